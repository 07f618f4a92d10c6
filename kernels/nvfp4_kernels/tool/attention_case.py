"""Correctness cases of attention: the GPU kernel against the CPU reference on the same inputs."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nvfp4_kernels import paged_attention
from nvfp4_kernels.attention import reference
from nvfp4_kernels.attention.call import PagedCall
from nvfp4_kernels.tool.task import Figures, Machine, Mismatch

# Relative to the largest value: BF16 rounds probabilities to 8 bits, E4M3 rounds queries, keys and
# probabilities to 4.
MAX_ERROR, MAX_ERROR_FP8 = 2.0**-6, 2.0**-3
# Absolute, of the LSE; E4M3 queries enter its logits.
MAX_LSE_ERROR, MAX_LSE_ERROR_FP8 = 1e-4, 0.1

TENSORS = (
    *("q", "kv_cache", "block_table", "seq_lens", "query_start"),
    *("sinks", "k_scale", "v_scale"),
)


@dataclass(frozen=True)
class AttentionCase:
    """Paged attention of the last tokens of several sequences.

    Attributes:
        lengths: number of queries and number of keys, for each sequence.
        query_heads, kv_heads, head_dim: sizes.
        page_size: keys per page.
        dtype: dtype of the queries and the output.
        fp8: whether the cache is E4M3.
        window, soft_cap: as for ``paged_attention``.
        sinks: whether heads have attention sinks.
    """

    lengths: tuple[tuple[int, int], ...]
    query_heads: int = 8
    kv_heads: int = 2
    head_dim: int = 128
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    fp8: bool = False
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False

    @property
    def section(self) -> str:
        return "correctness"

    @property
    def name(self) -> str:
        lengths = ", ".join(f"{queries} of {keys}" for queries, keys in self.lengths)
        words = [
            f"attention, {lengths}, heads {self.query_heads}/{self.kv_heads}×{self.head_dim}",
            f"pages of {self.page_size}, {str(self.dtype).removeprefix('torch.')}",
        ]
        words += ["FP8"] * self.fp8 + ["sinks"] * self.sinks
        words += [f"window {self.window}"] if self.window else []
        words += [f"soft cap {self.soft_cap}"] if self.soft_cap else []
        return ", ".join(words)

    def run(self, machine: Machine) -> Figures:
        tensors = self.tensors()
        expected, expected_lse = self.expected(tensors)
        actual, actual_lse = self.actual({n: t.to(machine.device) for n, t in tensors.items()})
        largest = float(expected.float().abs().max())
        off = float((actual.cpu().float() - expected.float()).abs().max()) / largest
        lse_off = float((actual_lse.cpu() - expected_lse).abs().max())
        _compare("out", off, MAX_ERROR_FP8 if self.fp8 else MAX_ERROR, "of the largest value")
        _compare("lse", lse_off, MAX_LSE_ERROR_FP8 if self.fp8 else MAX_LSE_ERROR, "")
        return {"values": float(expected.numel()), "off": off, "lse_off": lse_off}

    def expected(self, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Output and LSE of the CPU reference for the arguments ``given``."""
        tensors: list[Any] = [given.get(name) for name in TENSORS]
        scoring = None, True, self.window, self.soft_cap
        call = PagedCall._make((*tensors, *self._longest(), *scoring, None, False, None))
        return reference.paged_attention(call)

    def actual(self, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Output and LSE of the op for the arguments ``given``."""
        queries, keys = self._longest()
        return paged_attention(
            **given,
            max_query_len=queries,
            max_seq_len=keys,
            window=self.window,
            soft_cap=self.soft_cap,
        )

    def _longest(self) -> tuple[int, int]:
        queries, keys = (max(lengths) for lengths in zip(*self.lengths, strict=True))
        return queries, keys

    def tensors(self) -> dict[str, Tensor]:
        """Arguments of the op, on the CPU; cache slots without a key hold NaN."""
        seeded = torch.Generator().manual_seed(0)
        pages = [-(-keys // self.page_size) for _, keys in self.lengths]
        order = torch.randperm(sum(pages), generator=seeded).int()
        shape = (sum(pages), self.kv_heads, self.page_size, 2 * self.head_dim)
        cache = torch.randn(shape, generator=seeded)
        table = torch.zeros(len(pages), max(pages), dtype=torch.int32)
        used = 0
        for row, ((_, keys), count) in enumerate(zip(self.lengths, pages, strict=True)):
            table[row, :count] = order[used : used + count]
            used += count
            rest = keys - (count - 1) * self.page_size
            cache[int(table[row, count - 1]), :, rest:] = torch.nan
        starts = [0]
        for queries, _ in self.lengths:
            starts.append(starts[-1] + queries)
        q = torch.randn(starts[-1], self.query_heads, self.head_dim, generator=seeded)
        given = {
            "q": q.to(self.dtype),
            "kv_cache": cache.to(torch.float8_e4m3fn if self.fp8 else self.dtype),
            "block_table": table,
            "seq_lens": torch.tensor([keys for _, keys in self.lengths], dtype=torch.int32),
            "query_start": torch.tensor(starts, dtype=torch.int32),
        }
        if self.fp8:
            given |= {"k_scale": torch.tensor(0.5), "v_scale": torch.tensor(1.5)}
        if self.sinks:
            given["sinks"] = torch.randn(self.query_heads, generator=seeded)
        return given


def _compare(name: str, off: float, limit: float, unit: str) -> None:
    if not off <= limit:
        raise Mismatch(f"{name}: off by {off:.2g} {unit}, may be {limit:.2g} at the most")


def attention_cases(quick: bool) -> list[AttentionCase]:
    """Cases of head dimensions, dtypes, page sizes, query heads per KV head, and options."""
    mixed = ((1, 300), (70, 200), (200, 200), (1, 1))
    cases = [
        AttentionCase(mixed, head_dim=d, dtype=dtype)
        for d in (16, 64, 96, 128, 192, 256)
        for dtype in (torch.bfloat16, torch.float16)
    ]
    cases += [AttentionCase(mixed, head_dim=d, fp8=True) for d in (64, 96, 128, 192, 256)]
    cases += [AttentionCase(mixed, page_size=size) for size in (32, 64, 128)]
    cases += [AttentionCase(mixed, heads, kv) for heads, kv in ((4, 4), (7, 1), (10, 2))]
    cases += [
        AttentionCase(mixed, window=50),
        AttentionCase(mixed, soft_cap=20.0),
        AttentionCase(mixed, sinks=True),
        AttentionCase(((1, 5000),) * 2, sinks=True),
    ]
    if not quick:
        decode = tuple((1, 1000 + 997 * i) for i in range(16))
        cases += [AttentionCase(decode, 32, 8, fp8=fp8) for fp8 in (False, True)]
        cases.append(AttentionCase(((2048, 2048), (512, 4096)), 32, 8))
    return cases
