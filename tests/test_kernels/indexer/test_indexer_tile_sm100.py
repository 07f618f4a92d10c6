"""Memory layout of the scoring kernel's tiles on sm_100, and the choice for a problem."""

import itertools
from typing import get_args

import pytest

from nvfp4_kernels.indexer.formats import format_of
from nvfp4_kernels.indexer.sm100.choose import MAX_SPLITS, ScoreProblem, choose_config
from nvfp4_kernels.indexer.sm100.tile import (
    BARRIER_BYTES,
    EPILOGUE_REGISTERS,
    HEAD_DIMS,
    KEYS,
    MAX_HEADS,
    OTHER_REGISTERS,
    Format,
    ScoreTile,
)
from nvfp4_kernels.indexer.sm100.variant import Variant
from nvfp4_kernels.sm100.limits import SMS

SHARED, COLUMNS, REGISTERS = 227 * 1024, 512, 64 * 1024
FORMATS: tuple[Format, ...] = get_args(Format)
QUERIES = (1, 2, 3, 4, 8, 50, 4096)


def chosen(head_dim: int, heads: int, queries: int = 1) -> list[tuple[ScoreTile, int]]:
    return [choose_config(ScoreProblem(fmt, head_dim, heads, 1, queries, 5000)) for fmt in FORMATS]


@pytest.mark.parametrize("queries", QUERIES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_number_of_heads_has_a_tile_that_fits(head_dim: int, queries: int) -> None:
    for heads in range(1, MAX_HEADS + 1):
        for tile, splits in chosen(head_dim, heads, queries):
            assert heads <= tile.head_columns
            assert tile.columns % 16 == 0
            used = tile.query_bytes + tile.query_scale_bytes + BARRIER_BYTES
            used += tile.stages * (tile.key_bytes + tile.key_scale_bytes)
            assert used <= SHARED
            assert tile.accumulators * tile.columns + tile.scale_columns <= tile.tensor_columns
            assert tile.tensor_columns <= COLUMNS
            assert tile.stages >= 2
            assert tile.queries < 2 * queries or tile.queries == 1
            assert 1 <= splits <= MAX_SPLITS


def test_registers_that_move_are_there() -> None:
    for tile, _ in chosen(128, 64, 3):
        assert tile.moves_registers
        warps = tile.threads // 32
        assert warps == 16
        moved = tile.epilogue_warps * EPILOGUE_REGISTERS
        moved += (warps - tile.epilogue_warps) * OTHER_REGISTERS
        assert 32 * moved <= REGISTERS


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_bytes_are_the_format_s(fmt: Format, head_dim: int) -> None:
    tile, stored = ScoreTile(fmt, head_dim, 8), format_of(fmt)
    assert tile.row_bytes == stored.data_bytes(head_dim)
    assert tile.scale_bytes == stored.scale_bytes(head_dim)
    assert tile.chunks * tile.chunk_bytes == tile.row_bytes


def test_every_set_meets_every_phase_of_its_factors() -> None:
    for stages in range(2, 9):
        for pingpong in (1, 2):
            tile = ScoreTile("fp8", 128, 16, pingpong=pingpong, max_stages=stages)
            assert 0 <= stages - tile.stages < pingpong
            assert tile.stages % pingpong == 0


def test_boxes() -> None:
    for size in (0, 16, 32, 64, 128, 512):
        variant = Variant(size)
        assert variant.boxes * variant.box_rows == KEYS
        assert size == 0 or size % variant.box_rows == 0


def test_queries_share_keys_as_far_as_there_are_any() -> None:
    counts = {
        (heads, queries): chosen(128, heads, queries)[0][0].queries
        for heads, queries in itertools.product((8, 32, 64, 128), (1, 2, 3, 100))
    }
    assert [counts[64, n] for n in (1, 2, 3, 100)] == [1, 2, 3, 3]
    assert [counts[32, n] for n in (1, 2, 3, 100)] == [1, 2, 4, 6]
    assert [counts[8, n] for n in (1, 2, 3, 100)] == [1, 2, 3, 12]
    assert [counts[128, n] for n in (1, 2, 3, 100)] == [1, 1, 1, 1]


def test_a_single_group_has_two_pingpong_sets() -> None:
    assert chosen(128, 64)[0][0].pingpong == 2
    assert chosen(128, 64, 3)[0][0].pingpong == 1
    assert chosen(128, 128)[0][0].pingpong == 1  # registers are too few for two


def test_sms_are_kept_busy() -> None:
    def ctas(sequences: int, keys: int) -> int:
        problem = ScoreProblem("nvfp4", 128, 64, sequences, 1, keys)
        tile, splits = choose_config(problem)
        return sequences * splits * tile.groups

    assert 64 < ctas(1, 131072) <= SMS
    assert SMS / 2 < ctas(64, 131072) <= SMS
    assert ctas(1000, 131072) == 1000
    assert ctas(1, 100) == 1
