"""The backend on sm_90: decode steps on the plugin's kernel, other steps on FlashAttention 3.

In the emulator, a formula with FlashAttention's arguments stands in for FlashAttention.
"""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.test_plugin.attention.attention_layer import (
    BOUND,
    CPU,
    LAYOUTS,
    WRONG,
    Layer,
    Model,
    Sequence,
    furthest,
)
from tests.test_plugin.attention.flash_attention import flash_attn_varlen_func
from vllm_fp4_plugin.attention import cache
from vllm_fp4_plugin.attention.metadata import PagedAttentionMetadata, Part

pytestmark = [pytest.mark.arch("sm_90"), pytest.mark.schedules("random 1")]

SMALL = Model(head_dim=64)
CASES = {
    "gqa": SMALL,
    "mqa, head_dim 128": Model(kv_heads=1, head_dim=128),
    "head_dim 256": Model(head_dim=256),
    "groups of 16": Model(heads=32, head_dim=64),
    "window": Model(head_dim=64, window=9),
    "soft cap": Model(head_dim=64, soft_cap=0.7),
    "window, soft cap, page of 32": Model(head_dim=64, window=20, soft_cap=2.0, page_size=32),
    **{f"layout {name}": Model(head_dim=64, layout=name) for name in LAYOUTS},
}


class Calls:
    """Names of the kernels that served each step."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def of(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            self.names.append(name)
            return function(*args, **named)

        return call


@pytest.fixture
def calls(op_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Calls:
    from vllm.v1.attention.backends import fa_utils

    from vllm_fp4_plugin.attention import hopper

    found = Calls()
    flash = flash_attn_varlen_func if op_device == CPU else fa_utils.flash_attn_varlen_func
    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", found.of("flash", flash), raising=False)
    monkeypatch.setattr(hopper, "decode_attention", found.of("ours", hopper.decode_attention))
    return found


@pytest.mark.parametrize("model", CASES.values(), ids=CASES.keys())
def test_steps(model: Model, calls: Calls, op_device: torch.device) -> None:
    assert furthest(model, device=op_device) < BOUND
    # The last two steps are padded without sequences, as where vLLM replays piecewise graphs.
    assert calls.names == ["flash", "ours", "flash", "flash", "flash", "flash"]


FP8 = Model(head_dim=64, cache_dtype="fp8", k_scale=0.02, v_scale=0.03, q_scale=0.05)
FP8_CASES = {
    "gqa": FP8,
    "groups of 16, head_dim 128": replace(FP8, heads=16, kv_heads=1, head_dim=128),
    "head_dim 256": replace(FP8, head_dim=256),
    "window, soft cap, page of 32": replace(FP8, window=20, soft_cap=2.0, page_size=32),
    **{f"layout {name}": replace(FP8, layout=name) for name in LAYOUTS},
}


@pytest.mark.parametrize("model", FP8_CASES.values(), ids=FP8_CASES)
def test_fp8_steps(model: Model, calls: Calls, op_device: torch.device) -> None:
    """FlashAttention takes E4M3 queries, our kernel queries as they are."""
    layer = Layer(model, device=op_device)
    layer.rounds_queries = lambda: calls.names[-1] == "flash"
    a, b = Sequence(), Sequence()
    for batch in ([(a, 37), (b, 20)], [(a, 1), (b, 1)], [(a, 2), (b, 1)]):
        output, expected = layer.step(batch)
        assert (output - expected).abs().max() < BOUND
    assert calls.names == ["flash", "ours", "flash"]


@pytest.mark.parametrize(
    ("scale", "tokens"),
    [("_q_scale", 2), ("_k_scale", 1), ("_k_scale", 2), ("_v_scale", 1), ("_v_scale", 2)],
)
def test_a_wrong_fp8_scale_is_noticed(
    scale: str, tokens: int, calls: Calls, op_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutant: FlashAttention or, where ``tokens`` is 1, our kernel reads another scale."""
    layer = Layer(FP8, device=op_device)
    layer.rounds_queries = lambda: calls.names[-1] == "flash"
    layer.step([(a := Sequence(), 37)])
    descaled = vars(layer.scales) | {scale: getattr(layer.scales, scale) * 4}
    exact, flash = layer.impl.attend, layer.impl._flash_attention

    def attend(layer: Any, *rest: Any) -> None:
        exact(SimpleNamespace(**descaled), *rest)

    def attend_by_flash(layer: Any, query: Tensor, *rest: Any) -> None:
        flash(SimpleNamespace(**descaled), query, *rest)

    if tokens == 1:
        monkeypatch.setattr(layer.impl, "attend", attend)
    else:
        monkeypatch.setattr(layer.impl, "_flash_attention", attend_by_flash)
    if scale == "_q_scale":  # queries are quantised with the right scale
        quantized = cache.quantized_queries
        monkeypatch.setattr(cache, "quantized_queries", lambda q, s: quantized(q, s / 4))
    output, expected = layer.step([(a, tokens)])
    assert (output - expected).abs().max() > WRONG


def pad_a_sequence(common: Any) -> None:
    """Pad as a CUDA graph of decode-only steps does; the table may name other sequences' pages."""
    here = common.seq_lens.device
    more = torch.zeros(1, dtype=torch.int32, device=here)
    common.query_start_loc = torch.cat([common.query_start_loc, common.query_start_loc[-1:] + 1])
    common.query_start_loc_cpu = common.query_start_loc.cpu()
    common.seq_lens = torch.cat([common.seq_lens, more])
    common.block_table_tensor = common.block_table_tensor[[*range(common.num_reqs), 0]]
    common.num_reqs += 1


def test_padded_steps(calls: Calls, op_device: torch.device) -> None:
    layer = Layer(SMALL, device=op_device)
    a, b = Sequence(), Sequence()
    layer.step([(a, 18), (b, 3)])
    layer.disturb = pad_a_sequence
    output, expected = layer.step([(a, 1), (b, 1)], padding=1)
    assert (output - expected).abs().max() < BOUND
    layer.disturb = lambda _: None
    output, expected = layer.step([(a, 2), (b, 3)])
    assert (output - expected).abs().max() < BOUND
    assert calls.names == ["flash", "ours", "flash"]


def test_a_layer_that_reads_anothers_cache(calls: Calls, op_device: torch.device) -> None:
    """The layer neither sees nor stores the key that it is given."""
    layer = Layer(SMALL, device=op_device)
    layer.step([(sequence := Sequence(), 20)])
    writer, exact = layer.impl, layer.impl.attend
    calls.names.clear()

    def both(of: Any, q: Tensor, k: Tensor, v: Tensor, cache: Tensor, *rest: Any) -> None:
        writer.store(of, k, v, cache, rest[0].slot_mapping)
        writer.kv_sharing_target_layer_name = "model.layers.0.self_attn.attn"
        exact(of, q, -k, -v, cache, *rest)
        writer.kv_sharing_target_layer_name = None

    writer.attend = both
    output, expected = layer.step([(sequence, 1)])
    assert (output - expected).abs().max() < BOUND
    assert calls.names == ["flash"]


def windowed(op_device: torch.device) -> tuple[Layer, list[Sequence]]:
    """Layer with a window whose older pages vLLM frees, and sequences of several pages."""
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    layer = Layer(replace(SMALL, window=20), device=op_device)
    layer.builder.kv_cache_spec = SlidingWindowSpec(
        block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, sliding_window=20
    )
    layer.kv_cache[0] = 0.0
    layer.free.remove(0)
    sequences = [Sequence(), Sequence(), Sequence()]
    layer.step(list(zip(sequences, (70, 35, 9), strict=True)))
    return layer, sequences


def give_away(layer: Layer, sequences: list[Sequence]) -> None:
    """Fill pages before the windows of the next queries with NaN, as another layer may."""
    for sequence in sequences:
        first = max(0, len(sequence.keys) - 20 + 1)
        for page in sequence.pages[: first // 16]:
            layer.kv_cache[page] = torch.nan


@pytest.mark.parametrize("queries", [(3, 1, 2), (16, 16, 16), (1, 1, 1)])
def test_pages_given_away_do_not_matter(
    queries: tuple[int, ...], calls: Calls, op_device: torch.device
) -> None:
    layer, sequences = windowed(op_device)
    give_away(layer, sequences)
    output, expected = layer.step(list(zip(sequences, queries, strict=True)))
    assert (output - expected).abs().max() < BOUND


def test_tables_of_groups_that_share_metadata(calls: Calls, op_device: torch.device) -> None:
    """Metadata of a step are built for one group and updated with the table of another."""
    layer, _ = windowed(op_device)
    lengths = torch.tensor([73, 36], dtype=torch.int32, device=op_device)
    part = Part(
        slice(0, 4), torch.tensor([0, 3, 4], dtype=torch.int32, device=op_device), lengths,
        torch.zeros(2, 8, dtype=torch.int32, device=op_device), 3, 73,
    )  # fmt: skip
    tokens = torch.zeros(4, dtype=torch.int64, device=op_device)
    table = torch.arange(1, 17, dtype=torch.int32, device=op_device).view(2, 8)
    metadata = PagedAttentionMetadata([part], tokens, lengths, tokens)
    [found] = layer.builder.update_block_table(metadata, table, tokens).parts
    # The first queries of the sequences are at positions 70 and 35: they see keys from 51 and 16
    # on.
    assert found.block_table.tolist() == [[0] * 3 + [*range(4, 9)], [0, *range(10, 17)]]
    assert found.block_table.data_ptr() == table.data_ptr()


@pytest.mark.parametrize("flash", ["", "pages filled in this step", "another layer's cache"])
def test_tables_of_decodes(flash: str, calls: Calls, op_device: torch.device) -> None:
    """FlashAttention attends some steps of one token per sequence, our kernel the others."""
    layer, _ = windowed(op_device)
    if flash == "another layer's cache":
        sharing = SimpleNamespace(kv_sharing_target_layer_name="layer")
        layer.builder.layer_names, context = ["sharing"], {"sharing": sharing}
        layer.builder.vllm_config = SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context=context)
        )
    lengths = torch.tensor([73, 36], dtype=torch.int32, device=op_device)
    starts = torch.tensor([0, 1, 2], dtype=torch.int32, device=op_device)
    table = torch.arange(1, 17, dtype=torch.int32, device=op_device).view(2, 8)
    part = Part(slice(0, 2), starts, lengths, table, 1, 73)
    tokens = torch.zeros(2, dtype=torch.int64, device=op_device)
    stores_first = flash == "pages filled in this step"
    metadata = PagedAttentionMetadata([part], tokens, lengths, tokens, stores_first)
    [found] = layer.builder.update_block_table(metadata, table, tokens).parts
    assert found.block_table.eq(0).sum(1).tolist() == ([3, 1] if flash else [0, 0])


def test_pages_given_away_show(
    calls: Calls, op_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutant: the table keeps freed pages, as in vLLM 0.32; FlashAttention's formula reads them."""
    layer, sequences = windowed(op_device)
    give_away(layer, sequences)
    monkeypatch.setattr(layer.builder, "_without_pages_given_away", lambda metadata: metadata)
    output, _ = layer.step(list(zip(sequences, (3, 1, 2), strict=True)))
    assert output.isnan().any()


def shift_slots(common: Any) -> None:
    common.slot_mapping = common.slot_mapping + 1


def forget_new_token(common: Any) -> None:
    common.seq_lens = common.seq_lens - 1
    common.slot_mapping = torch.full_like(common.slot_mapping, -1)  # or the op would refuse it


def swap_pages(common: Any) -> None:
    """Swap full pages: a new token's page is checked against its slot."""
    common.block_table_tensor[:, 0] = common.block_table_tensor[:, 0].flip(0)


@pytest.mark.parametrize(
    ("fault", "step"), [(shift_slots, 0), (forget_new_token, 1), (swap_pages, 1)]
)
def test_wrong_metadata_is_noticed(
    fault: Callable[[Any], None], step: int, calls: Calls, op_device: torch.device
) -> None:
    """Mutant: wrong metadata of the prefill or of the decode changes the decode's result."""
    layer = Layer(SMALL, device=op_device)
    a, b = Sequence(), Sequence()
    for index, batch in enumerate(([(a, 37), (b, 20)], [(a, 1), (b, 1)])):
        layer.disturb = fault if index == step else lambda _: None
        output, expected = layer.step(batch)
    apart = (output - expected).abs().max().item()
    assert not apart <= WRONG  # nor if it is NaN
    assert calls.names == ["flash", "ours"]


@pytest.mark.parametrize("change", ["window", "soft_cap"])
def test_ignored_option_is_noticed(
    change: str, calls: Calls, op_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutant: the kernel does not get the window or the soft cap."""
    from vllm_fp4_plugin.attention import hopper

    exact = hopper.decode_attention
    monkeypatch.setattr(
        hopper, "decode_attention", lambda *a, **named: exact(*a, **(named | {change: None}))
    )
    assert furthest(CASES["window, soft cap, page of 32"], device=op_device) > WRONG


def test_more_heads_than_the_kernel_has(op_device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"num_heads: 17 query heads for 1 of keys.* FLASH_ATTN"):
        Layer(Model(heads=17, kv_heads=1, head_dim=64), device=op_device)
