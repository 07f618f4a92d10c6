"""Attention layer driven step by step over a paged cache as in vLLM, and the formula for it.

Keys and values are bfloat16 in the formula too, so the only errors are float32 arithmetic and one
rounding of the result to bfloat16: a relative error of at most 2⁻⁸, of values up to 4.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

BOUND = 0.016
WRONG = 0.1
CPU = torch.device("cpu")

CONFIG: Any = SimpleNamespace(
    speculative_config=None,
    parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    compilation_config=SimpleNamespace(static_forward_context={}, max_cudagraph_capture_size=None),
    scheduler_config=SimpleNamespace(max_num_seqs=16, max_num_batched_tokens=1024),
    cache_config=SimpleNamespace(enable_prefix_caching=False),
    model_config=SimpleNamespace(dtype=torch.bfloat16),
)
LAYOUTS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]


@dataclass(frozen=True)
class Model:
    """Shape and options of one attention layer."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    cache_dtype: str = "auto"
    k_scale: float = 1.0
    v_scale: float = 1.0
    q_scale: float = 1.0  # of FlashAttention's E4M3 queries
    page_size: int = 16
    layout: str = "LBHNC"


@dataclass
class Sequence:
    """Pages of a request, and the keys and values that it has computed so far."""

    pages: list[int] = field(default_factory=list)
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


def pages_of(
    layout: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """One layer of a two-layer cache in the given layout, filled with garbage."""
    from vllm.v1.kv_cache_interface import KVCacheLayout

    order = KVCacheLayout[layout].stride_order
    logical = (2, *shape)
    memory = torch.full([logical[i] for i in order], 0x7F, dtype=torch.uint8)
    if dtype != torch.uint8:
        memory = torch.full(memory.shape, math.nan, dtype=dtype)
    return memory.to(device).permute([order.index(i) for i in range(5)])[1]


class Layer:
    """Driver in place of vLLM: pages, slots, metadata, and keys and values for the formula."""

    def __init__(
        self,
        model: Model,
        disturb: Callable[[Any], None] = lambda _: None,
        device: torch.device = CPU,
    ) -> None:
        from vllm_fp4_plugin.attention.backend import PagedAttentionBackend

        self.model, self.disturb, self.device = model, disturb, device
        self.rounds_queries: Callable[[], bool] = lambda: False  # to E4M3, in the last step
        self.random = torch.Generator().manual_seed(0)
        sinks = torch.randn(model.heads, generator=self.random) * 2 if model.sinks else None
        self.sinks = None if sinks is None else sinks.bfloat16()
        self.impl: Any = PagedAttentionBackend.get_impl_cls()(
            model.heads, model.head_dim, model.head_dim**-0.5, model.kv_heads, None, model.window,
            model.cache_dtype, model.soft_cap, sinks=self.sinks,
        )  # fmt: skip
        self.impl.process_weights_after_loading(torch.bfloat16)
        spec = SimpleNamespace(
            head_size=model.head_dim,
            head_size_v=model.head_dim,
            block_size=model.page_size,
            num_kv_heads=model.kv_heads,
        )
        # No layer names: with them the builder would compile kernels on a GPU.
        self.builder: Any = PagedAttentionBackend.get_builder_cls()(spec, [], CONFIG, device)
        scales = torch.tensor([model.k_scale, model.v_scale, model.q_scale], device=device)
        self.scales = SimpleNamespace(_k_scale=scales[0], _v_scale=scales[1], _q_scale=scales[2])
        dtype = torch.uint8 if model.cache_dtype == "fp8" else torch.bfloat16
        shape = (64, model.kv_heads, model.page_size, 2 * model.head_dim)
        self.kv_cache = pages_of(model.layout, shape, dtype, device)
        self.free = torch.randperm(64, generator=self.random).tolist()

    def new(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random).bfloat16()

    def step(self, batch: list[tuple[Sequence, int]], padding: int = 0) -> tuple[Tensor, Tensor]:
        """Give each sequence new tokens; returns the outputs of the backend and of the formula."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        model, total = self.model, sum(n for _, n in batch)
        q = self.new(total + padding, model.heads, model.head_dim)
        k, v = (self.new(total + padding, model.kv_heads, model.head_dim) for _ in range(2))
        slots, lengths, starts = [], [], [0]
        for sequence, n in batch:
            done = len(sequence.keys)
            while len(sequence.pages) * model.page_size < done + n:
                sequence.pages.append(self.free.pop())
            for token in range(done, done + n):
                page = sequence.pages[token // model.page_size]
                slots.append(page * model.page_size + token % model.page_size)
            rows = slice(starts[-1], starts[-1] + n)
            sequence.keys += k[rows].unbind()
            sequence.values += v[rows].unbind()
            lengths.append(done + n)
            starts.append(starts[-1] + n)
        # Unused entries are arbitrary pages on CPU; on a GPU they are 0 for FlashAttention, as in
        # vLLM.
        unused = 2**30 if self.device == CPU else 0
        table = torch.full((len(batch), 8), unused, dtype=torch.int32)
        for row, (sequence, _) in zip(table, batch, strict=True):
            row[: len(sequence.pages)] = torch.tensor(sequence.pages)
        here = self.device
        common = CommonAttentionMetadata(
            query_start_loc=torch.tensor(starts, dtype=torch.int32, device=here),
            query_start_loc_cpu=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=here),
            num_reqs=len(batch),
            num_actual_tokens=total + padding,
            max_query_len=max(n for _, n in batch),
            max_seq_len=max(lengths),
            block_table_tensor=table.to(here),
            slot_mapping=torch.tensor(slots + [-1] * padding, device=here),
        )
        self.disturb(common)
        metadata = self.builder.build(0, common)
        there = [x.to(here) for x in (q, k, v)]
        output = torch.full_like(there[0], math.nan)
        self.impl.forward(self.scales, *there, self.kv_cache, metadata, output)
        return output[:total].cpu().double(), self.formula(q, batch, starts)

    def formula(self, q: Tensor, batch: list[tuple[Sequence, int]], starts: list[int]) -> Tensor:
        rows = [
            self.attend(q[start : start + n], sequence)
            for (sequence, n), start in zip(batch, starts, strict=False)
        ]
        return torch.cat(rows)

    def attend(self, q: Tensor, sequence: Sequence) -> Tensor:
        model, group = self.model, self.model.heads // self.model.kv_heads
        k, v = (torch.stack(x).double() for x in (sequence.keys, sequence.values))
        if model.cache_dtype == "fp8":
            k, v = rounded(k, model.k_scale), rounded(v, model.v_scale)
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        queries = rounded(q, model.q_scale) if self.rounds_queries() else q.double()
        logits = torch.einsum("qhd,khd->hqk", queries, k) * model.head_dim**-0.5
        if model.soft_cap is not None:
            logits = model.soft_cap * (logits / model.soft_cap).tanh()
        position = torch.arange(len(k) - len(q), len(k))[:, None]
        key = torch.arange(len(k))
        hidden = key > position
        if model.window is not None:
            hidden |= key <= position - model.window
        logits = logits.masked_fill(hidden, -math.inf)
        if self.sinks is not None:
            sink = self.sinks.double()[:, None, None].expand(-1, len(q), 1)
            weights = torch.cat([logits, sink], -1).softmax(-1)[..., :-1]
        else:
            weights = logits.softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v)


def rounded(x: Tensor, scale: float) -> Tensor:
    """Values rounded to E4M3: the nearest of its 253 values, ties to the even code."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]
    values = codes.view(torch.float8_e4m3fn).double()
    apart = (x.float() / torch.tensor(scale)).double().unsqueeze(-1) - values
    order = apart.abs() + (codes & 1) * 1e-9  # an odd code loses a tie
    return values[order.argmin(-1)] * torch.tensor(scale).double()


def furthest(
    model: Model, disturb: Callable[[Any], None] = lambda _: None, device: torch.device = CPU
) -> float:
    """Largest difference from the formula, over steps of every kind that vLLM schedules."""
    layer = Layer(model, disturb, device)
    a, b, c, d = (Sequence() for _ in range(4))
    apart = []
    for batch, padding in (
        ([(a, 37), (b, 1), (c, 16)], 0),  # prefill, of a page and of one token
        ([(a, 1), (b, 1), (c, 1)], 0),  # decode
        ([(a, 1), (d, 40), (b, 5)], 3),  # mixed; a chunk of a prefill; padding
        ([(d, 11), (a, 1), (c, 1), (b, 1)], 0),
        ([(a, 1), (c, 1), (d, 7), (b, 1)], 2),  # decodes first, as vLLM orders them
        ([(d, 1)], 7),
    ):
        output, expected = layer.step(batch, padding)
        apart.append((output - expected).abs().max().item())
    return max(x if x == x else math.inf for x in apart)
