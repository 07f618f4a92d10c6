"""Cases of ops fused into attention; results must equal the separate ops' on the same GPU.

The comparison is bit for bit. Cases in other modules compare the separate ops with references.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nvfp4_kernels import Static, paged_attention, quantize, rotary_attention, rotary_store
from nvfp4_kernels.attention.rotary_op import HeadRotation
from nvfp4_kernels.tool.attention_case import AttentionCase
from nvfp4_kernels.tool.forced_product_case import SECTION
from nvfp4_kernels.tool.product_case import compare_exact
from nvfp4_kernels.tool.task import Figures, Machine, Mismatch

STORED = ("k", "v", "positions", "slot_mapping")
EPS = 1e-6
INPUT_SCALE = 300.0


@dataclass(frozen=True)
class FusedAttentionCase:
    """Paged attention with fused split-KV merge, quantisation, rotary embedding and KV store.

    Attributes:
        attention: sequences, sizes and cache.
        quantized: whether the output is NVFP4.
        rotated: whether queries and keys are normalised and rotated, and keys and values stored.
        launches: number of launches of the fused op, each on a cache without the new keys.
    """

    attention: AttentionCase
    quantized: bool = True
    rotated: bool = False
    launches: int = 1

    @property
    def section(self) -> str:
        return SECTION if self.launches > 1 else "correctness"

    @property
    def name(self) -> str:
        words = ["rotary_attention"] if self.rotated else []
        words += ["NVFP4 result"] * self.quantized
        words += [f"{self.launches} launches"] * (self.launches > 1)
        return f"{', '.join(words)}: {self.attention.name}"

    def run(self, machine: Machine) -> Figures:
        given = {n: x.to(machine.device) for n, x in self.attention.tensors().items()}
        heads = self._heads(given) if self.rotated else {}
        expected = self._apart({**given, "kv_cache": given["kv_cache"].clone()}, heads)
        for _ in range(self.launches):
            actual = self._together({**given, "kv_cache": given["kv_cache"].clone()}, heads)
            for one, other in zip(actual, expected, strict=True):
                compare_exact(one, other)
        return {"values": float(sum(x.numel() for x in expected))}

    def _apart(self, given: dict[str, Any], heads: dict[str, Tensor]) -> list[Tensor]:
        """Results of the separate ops: values or codes, scales, LSE and the cache."""
        if heads:
            rest: dict[str, Any] = {n: heads[n] for n in STORED}
            given["q"] = rotary_store(
                q=given["q"], kv_cache=given["kv_cache"], **rest, eps=EPS,
                cos_sin_cache=heads["cos_sin_cache"], q_norm=heads["q_norm"],
                k_norm=heads["k_norm"], k_scale=given.get("k_scale"), v_scale=given.get("v_scale"),
            )  # fmt: skip
        out, lse = paged_attention(**given, **self._options)
        results = [out]
        if self.quantized:
            results = list(
                quantize(out.flatten(1), Static(torch.tensor(INPUT_SCALE, device=out.device)))
            )
        return [*map(_bytes, results), lse, _bytes(given["kv_cache"])]

    def _together(self, given: dict[str, Any], heads: dict[str, Tensor]) -> list[Tensor]:
        """Results of the fused op, in which the last CTA merges split-KV."""
        q, cache = given["q"], given["kv_cache"]
        counters = torch.zeros(len(given["seq_lens"]) * cache.shape[1], device=q.device).int()
        options: dict[str, Any] = {**self._options, "counters": counters}
        if self.quantized:
            input_scale = torch.tensor(INPUT_SCALE, device=q.device)
            options["output"] = Static(input_scale)
            scales = quantize(q.flatten(1), Static(input_scale))[1].zero_()
            options["out"] = (
                q.new_empty((*q.shape[:-1], q.shape[-1] // 2), dtype=torch.uint8),
                scales,
            )
        found: tuple[Tensor, Tensor | None, Tensor]
        if heads:
            rotation = HeadRotation(
                heads["cos_sin_cache"], True, heads["q_norm"], heads["k_norm"], EPS
            )
            rest: dict[str, Any] = {n: heads[n] for n in STORED}
            found = rotary_attention(**given, **rest, rotation=rotation, **options)
        elif self.quantized:
            found = paged_attention(**given, **options)
        else:
            values, lse = paged_attention(**given, **options)
            found = values, None, lse
        if counters.any():
            raise Mismatch("counters: are not zeros after the launch, must be for the next one")
        values, block_scales, lse = found
        results = [values] if block_scales is None else [values.flatten(1), block_scales]
        return [*map(_bytes, results), lse, _bytes(cache)]

    @property
    def _options(self) -> dict[str, Any]:
        case = self.attention
        queries, keys = (max(lengths) for lengths in zip(*case.lengths, strict=True))
        return {
            "max_query_len": queries, "max_seq_len": keys, "window": case.window,
            "soft_cap": case.soft_cap,
        }  # fmt: skip

    def _heads(self, given: dict[str, Any]) -> dict[str, Tensor]:
        """Keys, values, angles, norms, positions and slots of the last tokens of each sequence."""
        case, seeded = self.attention, torch.Generator().manual_seed(1)
        positions, slots = [], []
        for row, (queries, keys) in enumerate(case.lengths):
            for position in range(keys - queries, keys):
                page = int(given["block_table"][row, position // case.page_size])
                positions.append(position)
                slots.append(page * case.page_size + position % case.page_size)
        shape = len(positions), case.kv_heads, case.head_dim
        longest = max(keys for _, keys in case.lengths)
        angles = torch.randn(longest, case.head_dim // 2, generator=seeded)
        weights = 1 + torch.randn(2, case.head_dim, generator=seeded) / 8
        made = {
            "k": torch.randn(shape, generator=seeded).to(case.dtype),
            "v": torch.randn(shape, generator=seeded).to(case.dtype),
            "cos_sin_cache": torch.cat((angles.cos(), angles.sin()), -1).to(case.dtype),
            "q_norm": weights[0].to(case.dtype),
            "k_norm": weights[1].to(case.dtype),
            "positions": torch.tensor(positions),
            "slot_mapping": torch.tensor(slots),
        }
        return {name: x.to(given["q"].device) for name, x in made.items()}


def _bytes(x: Tensor) -> Tensor:
    """Bytes of a tensor, to compare: slots without a key hold NaN, which never equals NaN."""
    return x.view(torch.uint8)


def fused_attention_cases(quick: bool) -> list[FusedAttentionCase]:
    """Cases of mixed and decode batches, with and without split-KV, with both cache dtypes."""
    mixed, decode = ((1, 300), (70, 200), (1, 1)), ((1, 5000), (2, 300), (1, 1))
    attentions = [
        AttentionCase(decode, head_dim=d, fp8=fp8) for d in (64, 128, 256) for fp8 in (False, True)
    ]
    attentions += [AttentionCase(decode, *heads) for heads in ((32, 8), (7, 1))]
    attentions += [AttentionCase(decode, window=50, sinks=True)]
    cases = [FusedAttentionCase(AttentionCase(mixed, head_dim=d)) for d in (64, 128, 256)]
    cases += [FusedAttentionCase(attention) for attention in attentions]
    cases += [FusedAttentionCase(a, q, rotated=True) for a in attentions for q in (False, True)]
    cases.append(FusedAttentionCase(AttentionCase(decode, 32, 8), quantized=False))
    if not quick:
        many = tuple((1, 1000 + 97 * i) for i in range(64))
        cases += [
            FusedAttentionCase(AttentionCase(many, 32, 8, fp8=f), True, True) for f in (False, True)
        ]
    return cases
