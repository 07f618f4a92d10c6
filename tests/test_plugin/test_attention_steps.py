"""The backend as vLLM drives it, step by step over a paged cache, against attention in float64.

Keys and values are bfloat16 in the formula too, so what remains is float32 arithmetic and one
rounding of the result to bfloat16: half a unit of 2⁻⁸ of values up to 4.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_fp4_plugin.attention import cache

BOUND = 0.016
WRONG = 0.1

CONFIG: Any = SimpleNamespace(
    speculative_config=None, parallel_config=SimpleNamespace(decode_context_parallel_size=1)
)
LAYOUTS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]


@dataclass(frozen=True)
class Model:
    """One attention layer."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    cache_dtype: str = "auto"
    k_scale: float = 1.0
    v_scale: float = 1.0
    page_size: int = 16
    layout: str = "LBHNC"


@dataclass
class Sequence:
    """What a request has computed so far, and where it lies."""

    pages: list[int] = field(default_factory=list)
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


def pages_of(layout: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """One layer of a two-layer cache in this layout, with garbage in it."""
    from vllm.v1.kv_cache_interface import KVCacheLayout

    order = KVCacheLayout[layout].stride_order
    logical = (2, *shape)
    memory = torch.full([logical[i] for i in order], 0x7F, dtype=torch.uint8)
    if dtype != torch.uint8:
        memory = torch.full(memory.shape, math.nan, dtype=dtype)
    return memory.permute([order.index(i) for i in range(5)])[1]


class Layer:
    """vLLM's side: pages, slots, metadata; and the history for the formula."""

    def __init__(self, model: Model, disturb: Callable[[Any], None] = lambda _: None) -> None:
        from vllm_fp4_plugin.attention.impl import PagedAttentionImpl
        from vllm_fp4_plugin.attention.metadata import PagedAttentionMetadataBuilder

        self.model, self.disturb = model, disturb
        self.random = torch.Generator().manual_seed(0)
        sinks = torch.randn(model.heads, generator=self.random) * 2 if model.sinks else None
        self.sinks = None if sinks is None else sinks.bfloat16()
        self.impl = PagedAttentionImpl(
            model.heads, model.head_dim, model.head_dim**-0.5, model.kv_heads, None, model.window,
            model.cache_dtype, model.soft_cap, sinks=self.sinks,
        )  # fmt: skip
        self.impl.process_weights_after_loading(torch.bfloat16)
        spec = SimpleNamespace(head_size=model.head_dim, head_size_v=model.head_dim)
        self.builder = PagedAttentionMetadataBuilder(spec, ["attn"], CONFIG, torch.device("cpu"))
        self.scales = SimpleNamespace(
            _k_scale=torch.tensor(model.k_scale), _v_scale=torch.tensor(model.v_scale)
        )
        dtype = torch.uint8 if model.cache_dtype == "fp8" else torch.bfloat16
        shape = (64, model.kv_heads, model.page_size, 2 * model.head_dim)
        self.kv_cache = pages_of(model.layout, shape, dtype)
        self.free = torch.randperm(64, generator=self.random).tolist()

    def new(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random).bfloat16()

    def step(self, batch: list[tuple[Sequence, int]], padding: int = 0) -> tuple[Tensor, Tensor]:
        """Give each sequence that many new tokens; results of the backend and of the formula."""
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
        table = torch.full((len(batch), 8), 2**30, dtype=torch.int32)  # unused entries: any page
        for row, (sequence, _) in zip(table, batch, strict=True):
            row[: len(sequence.pages)] = torch.tensor(sequence.pages)
        common = CommonAttentionMetadata(
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            query_start_loc_cpu=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            num_reqs=len(batch),
            num_actual_tokens=total + padding,
            max_query_len=max(n for _, n in batch),
            max_seq_len=max(lengths),
            block_table_tensor=table,
            slot_mapping=torch.tensor(slots + [-1] * padding),
        )
        self.disturb(common)
        metadata = self.builder.build(0, common)
        output = torch.full_like(q, math.nan)
        arguments = self.scales, k, v, self.kv_cache
        self.impl.do_kv_cache_update(*arguments, common.slot_mapping)
        self.impl.forward(self.scales, q, k, v, self.kv_cache, metadata, output)
        return output[:total].double(), self.formula(q, batch, starts)

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
        logits = torch.einsum("qhd,khd->hqk", q.double(), k) * model.head_dim**-0.5
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
    """To E4M3 and back: the nearest of the 253 values, ties to an even code."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]
    values = codes.view(torch.float8_e4m3fn).double()
    apart = (x.float() / torch.tensor(scale)).double().unsqueeze(-1) - values
    order = apart.abs() + (codes & 1) * 1e-9  # an odd code loses a tie
    return values[order.argmin(-1)] * torch.tensor(scale).double()


CASES = {
    "gqa": Model(),
    "mha": Model(kv_heads=4),
    "mqa": Model(kv_heads=1),
    "head_dim 64": Model(head_dim=64),
    "head_dim 96": Model(head_dim=96),
    "head_dim 256": Model(head_dim=256),
    "window": Model(window=9),
    "window of a page": Model(window=16),
    "soft cap": Model(soft_cap=0.7),
    "sinks": Model(sinks=True),
    "sinks, window, soft cap": Model(sinks=True, window=20, soft_cap=2.0),
    "page of 32": Model(page_size=32),
    "page of 128": Model(page_size=128),
    "fp8": Model(cache_dtype="fp8", k_scale=0.011, v_scale=0.007),
    "fp8, saturated": Model(cache_dtype="fp8", k_scale=0.004, v_scale=0.005),
    "fp8, window, sinks": Model(cache_dtype="fp8", window=13, sinks=True),
    **{f"layout {name}": Model(layout=name) for name in LAYOUTS},
    **{f"fp8, layout {n}": Model(layout=n, cache_dtype="fp8", v_scale=0.3) for n in LAYOUTS},
}


def furthest(model: Model, disturb: Callable[[Any], None] = lambda _: None) -> float:
    """The largest difference over steps of every kind that vLLM schedules."""
    layer = Layer(model, disturb)
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


@pytest.mark.parametrize("model", CASES.values(), ids=CASES.keys())
def test_steps(model: Model) -> None:
    assert furthest(model) < BOUND


def test_decodes_are_launched_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a prefill they would have its tile, and their keys one SM each."""
    from vllm_fp4_plugin.attention import impl

    exact, launched = impl.paged_attention, []

    def record(q: Tensor, cache: Tensor, table: Tensor, *rest: Any, **named: Any) -> Any:
        launched.append((len(q), len(table), named["max_query_len"]))
        return exact(q, cache, table, *rest, **named)

    monkeypatch.setattr(impl, "paged_attention", record)
    layer = Layer(Model())
    a, b, c = (Sequence() for _ in range(3))
    layer.step([(a, 20), (b, 3)])
    layer.step([(a, 1), (b, 1)])
    layer.step([(a, 1), (b, 1), (c, 30)], padding=2)
    assert launched == [(23, 2, 20), (2, 2, 1), (2, 2, 1), (32, 1, 30)]


def test_a_layer_may_read_anothers_cache() -> None:
    """With ``kv_sharing_target_layer_name`` vLLM binds that layer's cache and writes no other."""
    from vllm_fp4_plugin.attention.impl import PagedAttentionImpl

    layer = Layer(Model())
    layer.step([(sequence := Sequence(), 20)])
    reader = PagedAttentionImpl(
        4, 32, 32**-0.5, 2, kv_sharing_target_layer_name="model.layers.0.self_attn.attn"
    )
    layer.impl.forward = reader.forward  # type: ignore[method-assign]
    output, expected = layer.step([(sequence, 3)])
    assert (output - expected).abs().max() < BOUND


def shift_slots(common: Any) -> None:
    common.slot_mapping = common.slot_mapping + 1


def forget_new_token(common: Any) -> None:
    common.seq_lens = common.seq_lens - (common.seq_lens > 1).int()


def swap_pages(common: Any) -> None:
    common.block_table_tensor[:, 0] = common.block_table_tensor[:, 0].flip(0)


def shift_queries(common: Any) -> None:
    """Of a prefill and what follows it: the builder tells decodes by the copy on CPU."""
    if common.num_reqs > 1 and common.query_start_loc[1] > 1:
        common.query_start_loc[1:-1] -= 1
        common.max_query_len += 1


@pytest.mark.parametrize("fault", [shift_slots, forget_new_token, swap_pages, shift_queries])
def test_wrong_metadata_is_noticed(fault: Callable[[Any], None]) -> None:
    """Mutation: the steps tell when the batch is described wrongly."""
    assert furthest(Model(), fault) > WRONG


@pytest.mark.parametrize("dropped", ["_k_scale", "_v_scale"])
def test_dropped_scale_is_noticed(dropped: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: reading with a scale of 1 what was stored with another."""
    from vllm_fp4_plugin.attention import impl

    exact = impl.paged_attention
    name = dropped.removeprefix("_")

    def without(*args: Any, **named: Any) -> Any:
        return exact(*args, **(named | {name: torch.tensor(1.0)}))

    monkeypatch.setattr(impl, "paged_attention", without)
    assert furthest(CASES["fp8"]) > WRONG


def test_swapped_scales_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: keys stored with the values' scale."""
    exact = cache.write

    def swapped(k: Any, v: Any, kv: Any, slots: Any, k_scale: Any, v_scale: Any) -> None:
        exact(k, v, kv, slots, v_scale, k_scale)

    monkeypatch.setattr(cache, "write", swapped)
    assert furthest(CASES["fp8"]) > WRONG


@pytest.mark.parametrize("change", ["window", "soft_cap", "sinks"])
def test_ignored_option_is_noticed(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: the op is not told of the window, the cap or the sinks."""
    from vllm_fp4_plugin.attention import impl

    exact = impl.paged_attention
    monkeypatch.setattr(
        impl, "paged_attention", lambda *a, **named: exact(*a, **(named | {change: None}))
    )
    assert furthest(CASES["sinks, window, soft cap"]) > WRONG
