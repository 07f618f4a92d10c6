"""Attention backend over steps of every kind that vLLM schedules, against attention in float64."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.test_plugin.attention.attention_layer import (
    BOUND,
    LAYOUTS,
    WRONG,
    Layer,
    Model,
    Sequence,
    furthest,
)
from vllm_fp4_plugin.attention import cache

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


@pytest.mark.parametrize("model", CASES.values(), ids=CASES.keys())
def test_steps(model: Model) -> None:
    assert furthest(model) < BOUND


def test_decodes_are_launched_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode launched with a prefill would get the prefill's tile, and its keys only one SM."""
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
    """The reader has ``kv_sharing_target_layer_name``: vLLM binds the target layer's cache."""
    from vllm_fp4_plugin.attention.impl import PagedAttentionImpl

    layer = Layer(Model())
    layer.step([(sequence := Sequence(), 20)])
    reader = PagedAttentionImpl(
        4, 32, 32**-0.5, 2, kv_sharing_target_layer_name="model.layers.0.self_attn.attn"
    )
    writer = layer.impl

    def both(layer: Any, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, of: Any, out: Any) -> None:
        writer.store(layer, k, v, cache, of.slot_mapping)
        reader.forward(layer, q, -k, -v, cache, of, out)

    layer.impl = SimpleNamespace(forward=both)  # type: ignore[assignment]
    output, expected = layer.step([(sequence, 3)])
    assert (output - expected).abs().max() < BOUND


def shift_slots(common: Any) -> None:
    common.slot_mapping = common.slot_mapping + 1


def forget_new_token(common: Any) -> None:
    common.seq_lens = common.seq_lens - (common.seq_lens > 1).int()


def swap_pages(common: Any) -> None:
    common.block_table_tensor[:, 0] = common.block_table_tensor[:, 0].flip(0)


def shift_queries(common: Any) -> None:
    """Move query starts in steps that begin with a prefill; the CPU copy identifies decodes."""
    if common.num_reqs > 1 and common.query_start_loc[1] > 1:
        common.query_start_loc[1:-1] -= 1
        common.max_query_len += 1


@pytest.mark.parametrize("fault", [shift_slots, forget_new_token, swap_pages, shift_queries])
def test_wrong_metadata_is_noticed(fault: Callable[[Any], None]) -> None:
    """Mutant: wrong metadata of the batch changes the result."""
    assert furthest(Model(), fault) > WRONG


@pytest.mark.parametrize("dropped", ["_k_scale", "_v_scale"])
def test_dropped_scale_is_noticed(dropped: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: the cache is read with a scale of 1 instead of the stored scale."""
    from vllm_fp4_plugin.attention import impl

    exact = impl.paged_attention
    name = dropped.removeprefix("_")

    def without(*args: Any, **named: Any) -> Any:
        return exact(*args, **(named | {name: torch.tensor(1.0)}))

    monkeypatch.setattr(impl, "paged_attention", without)
    assert furthest(CASES["fp8"]) > WRONG


def test_swapped_scales_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: keys are stored with the values' scale."""
    exact = cache.write

    def swapped(k: Any, v: Any, kv: Any, slots: Any, k_scale: Any, v_scale: Any) -> None:
        exact(k, v, kv, slots, v_scale, k_scale)

    monkeypatch.setattr(cache, "write", swapped)
    assert furthest(CASES["fp8"]) > WRONG


@pytest.mark.parametrize("change", ["window", "soft_cap", "sinks"])
def test_ignored_option_is_noticed(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: the op does not get the window, the soft cap or the sinks."""
    from vllm_fp4_plugin.attention import impl

    exact = impl.paged_attention
    monkeypatch.setattr(
        impl, "paged_attention", lambda *a, **named: exact(*a, **(named | {change: None}))
    )
    assert furthest(CASES["sinks, window, soft cap"]) > WRONG
