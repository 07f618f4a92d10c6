"""Layer of DeepSeek V3.2 with the plugin's indexer, step by step over a paged cache."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.test_plugin.indexer.indexer_layer import HEAD_DIM, HIDDEN, LORA, Step, quantize_fp8
from tests.test_plugin.indexer.indexer_v32 import GenericLayer

FORMATS = ("nvfp4", "mxfp4", "fp8", "bf16")
STEPS: list[Step] = [
    [("a", 5)],  # fewer keys than are chosen
    [("a", 1), ("b", 11), ("c", 70)],
    [("a", 1), ("b", 5), ("c", 58)],  # b has as many keys as are chosen; c fills two pages
    [("a", 1), ("b", 1), ("c", 1)],  # one more than that; c begins a third page
    [("c", 1), ("a", 60)],
]


@pytest.mark.parametrize("fmt", FORMATS)
def test_steps(fmt: str, indexer_config: Any) -> None:
    layer = GenericLayer(indexer_config, fmt)
    for step in STEPS:
        layer.step(step)


@pytest.mark.parametrize("fmt", FORMATS)
def test_decodes_of_two_tokens(fmt: str, indexer_config: Any) -> None:
    """Decodes have two tokens, as with one speculative token; a single token joins the prefills."""
    layer = GenericLayer(indexer_config, fmt, next_n=2)
    layer.step([("a", 30), ("b", 63), ("c", 2)])
    for step, decodes in (
        ([("a", 2), ("b", 2)], (2, 2)),
        ([("b", 2), ("c", 2), ("a", 40)], (2, 2)),
        ([("a", 2), ("b", 1)], (1, 2)),
        ([("a", 1), ("b", 1)], (2, 1)),
    ):
        assert layer.step(step).decode.seq_lens.shape == decodes


def test_without_the_option(indexer_config: Any) -> None:
    """The default is FP8 with vLLM's own ``Indexer``."""
    layer = GenericLayer(indexer_config, None)
    assert layer.cache_layer.kv_cache.shape[-1] == 132
    for step in STEPS:
        layer.step(step)


def test_chunks(indexer_config: Any) -> None:
    """Prefills are split by sequence, and long sequences by queries, which share gathered keys."""
    layer = GenericLayer(indexer_config, "nvfp4")
    split = layer.builder._split_indexer_prefill_chunks

    def split_small(lens: Any, counts: Any, keys: int, logits: int, request_offset: int) -> Any:
        return split(lens, counts, 100, 4 * 2000, request_offset)

    layer.builder._split_indexer_prefill_chunks = split_small
    metadata = layer.step([("a", 20), ("b", 90), ("c", 30), ("d", 31)])
    chunks = metadata.prefill.chunks
    assert [(c.token_start, c.token_end, c.skip_kv_gather) for c in chunks] == [
        (0, 20, False), (20, 42, False), (42, 64, True), (64, 86, True), (86, 108, True),
        (108, 110, True), (110, 140, False), (140, 171, False),
    ]  # fmt: skip
    layer.step([("a", 1), ("c", 40), ("d", 41)])


def test_decodes_query_by_query(indexer_config: Any) -> None:
    """Decodes are flattened to one query per row, as vLLM does for kernels that require it."""
    layer = GenericLayer(indexer_config, "nvfp4", next_n=3)
    layer.builder.use_flattening = True
    layer.step([("a", 30), ("b", 63), ("c", 5)])
    metadata = layer.step([("a", 3), ("b", 1), ("c", 2), ("none", 0)])
    assert metadata.decode.seq_lens.flatten().tolist() == [31, 32, 33, 64, 6, 7]


def test_queries_and_sequences_that_are_padding() -> None:
    """Three sequences have 1, 2 and 0 queries; further queries belong to no sequence."""
    from vllm_fp4_plugin.indexer.selection import _decode_contexts

    decode = SimpleNamespace(
        decode_lens=torch.tensor([1, 2, 0]),
        seq_lens=torch.tensor([[4, 5], [8, 9], [3, 3]], dtype=torch.int32),
        block_table=torch.tensor([[10], [20], [30]], dtype=torch.int32),
        requires_padding=True,
    )
    for tokens in (5, 6):  # six are as many as three sequences of two
        context_lens, block_table = _decode_contexts(decode, tokens)
        assert context_lens.tolist() == [[5], [8], [9]] + [[0]] * (tokens - 3)
        assert context_lens.dtype == torch.int32
        assert block_table[:3].tolist() == [[10], [20], [20]]


def test_queries_are_those_that_vllm_quantises(indexer_config: Any) -> None:
    """Equal weights and inputs give equal queries in vLLM's layer, up to FP8 rounding."""
    from vllm.model_executor.models.deepseek_v2 import Indexer

    layer = GenericLayer(indexer_config, "bf16")
    inputs = torch.randn(9, HIDDEN).bfloat16(), torch.randn(9, LORA).bfloat16()
    seen: list[tuple[Tensor, ...]] = []
    layer.indexer.indexer_op.forward = lambda _, *given: seen.append(given)
    for kind in (type(layer.indexer), Indexer):
        layer.indexer.__class__ = kind
        with torch.inference_mode():
            layer.indexer(*inputs, torch.arange(9) * 7, layer.rotation)
    (q, k, weights), (their_q, their_k, their_weights) = seen
    data, scales = quantize_fp8(q, HEAD_DIM)
    assert torch.equal(data.float(), their_q.float())
    assert torch.equal(k, their_k)
    torch.testing.assert_close(weights * scales.squeeze(-1), their_weights, rtol=1e-6, atol=0)


def test_more_room_than_keys(indexer_config: Any) -> None:
    """The host knows only an upper bound of the lengths after speculation."""
    layer = GenericLayer(indexer_config, "nvfp4")

    def widen(metadata: Any) -> None:
        metadata.prefill.chunks[0].total_seq_lens += 5

    layer.step([("a", 30), ("b", 63)], disturb=widen)


@pytest.mark.parametrize("next_n", [1, 2])
def test_padding(next_n: int, indexer_config: Any) -> None:
    """Tokens and sequences pad a CUDA graph; the buffer is wider than top-k."""
    layer = GenericLayer(indexer_config, "nvfp4", next_n=next_n, wider=3)
    layer.step([("a", 30), ("b", 63)], padding=5)
    layer.step([("a", next_n), ("b", next_n), ("none", 0), ("no other", 0)], padding=2 * next_n)


def test_padding_tokens_among_the_decodes(indexer_config: Any) -> None:
    """Padding counts as decodes without a sequence: a CUDA graph replays a fixed batch."""
    layer = GenericLayer(indexer_config, "nvfp4", next_n=2)
    layer.step([("a", 30), ("b", 63)])

    def count_padding(metadata: Any) -> None:
        metadata.num_decode_tokens += 4
        assert metadata.decode.requires_padding

    layer.step([("a", 2), ("b", 2), ("none", 0)], padding=4, disturb=count_padding)


def test_slots_to_skip(indexer_config: Any) -> None:
    """A key whose slot is −1 is not stored."""
    layer = GenericLayer(indexer_config, "nvfp4")
    layer.step([("a", 4)])
    before = layer.cache_layer.kv_cache.clone()

    def skip(metadata: Any) -> None:
        metadata.slot_mapping = torch.full_like(metadata.slot_mapping, -1)

    layer.step([("a", 1)], disturb=skip)  # all keys are chosen, whatever they are
    assert torch.equal(layer.cache_layer.kv_cache, before)
    layer.step([("a", 1)])
    assert not torch.equal(layer.cache_layer.kv_cache, before)


def test_measuring_memory(indexer_config: Any) -> None:
    """The buffer and the cache stay unchanged without metadata."""
    from vllm.forward_context import set_forward_context

    layer = GenericLayer(indexer_config, "nvfp4")
    layer.buffer.fill_(3)
    before = layer.cache_layer.kv_cache.clone()
    with torch.inference_mode(), set_forward_context(None, indexer_config):
        layer.indexer(
            torch.randn(8, HIDDEN).bfloat16(), torch.randn(8, LORA).bfloat16(), torch.arange(8),
            layer.rotation,
        )  # fmt: skip
    assert (layer.buffer == 3).all()
    assert torch.equal(layer.cache_layer.kv_cache, before)
