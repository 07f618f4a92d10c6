"""Mutants with wrong metadata: the chosen keys change, so the layer's tests can fail."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.test_plugin.indexer.indexer_layer import Step
from tests.test_plugin.indexer.indexer_v32 import GenericLayer

DECODE: Step = [("a", 1), ("b", 1), ("c", 1)]
PREFILL: Step = [("a", 2), ("c", 20)]


def _swap_slots(metadata: Any) -> None:
    metadata.slot_mapping = metadata.slot_mapping.roll(1)


def _next_slots(metadata: Any) -> None:
    metadata.slot_mapping = metadata.slot_mapping + 1


def _shorten(metadata: Any) -> None:
    metadata.decode.seq_lens = metadata.decode.seq_lens - 1


def _lengthen(metadata: Any) -> None:
    metadata.decode.seq_lens = metadata.decode.seq_lens + 1


def _swap_tables(metadata: Any) -> None:
    metadata.decode.block_table = metadata.decode.block_table.roll(1, 0)


def _shorten_prefill(metadata: Any) -> None:
    for chunk in metadata.prefill.chunks:
        chunk.cu_seqlen_ke = chunk.cu_seqlen_ke - 1


def _shift_prefill(metadata: Any) -> None:
    for chunk in metadata.prefill.chunks:
        chunk.cu_seqlen_ks = chunk.cu_seqlen_ks + 1


def _swap_prefill_tables(metadata: Any) -> None:
    for chunk in metadata.prefill.chunks:
        chunk.block_table = chunk.block_table.roll(1, 0)


@pytest.mark.parametrize(
    ("step", "mutant"),
    [
        (DECODE, _swap_slots),
        (DECODE, _next_slots),
        (DECODE, _shorten),
        (DECODE, _lengthen),
        (DECODE, _swap_tables),
        (PREFILL, _swap_slots),
        (PREFILL, _shorten_prefill),
        (PREFILL, _shift_prefill),
        (PREFILL, _swap_prefill_tables),
    ],
)
def test_mutant(step: Step, mutant: Callable[[Any], None], indexer_config: Any) -> None:
    layer = GenericLayer(indexer_config, "bf16")
    layer.step([("a", 12), ("b", 17), ("c", 18)])
    with pytest.raises(AssertionError):
        _repeat(layer, step, mutant)


def _repeat(layer: GenericLayer, step: Step, mutant: Callable[[Any], None]) -> None:
    for _ in range(4):
        layer.step(step, disturb=mutant)
