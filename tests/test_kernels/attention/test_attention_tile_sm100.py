"""Memory layout of the sm_100 attention tiles, and the choice of a tile for a problem."""

import itertools
from dataclasses import replace

import pytest

from nvfp4_kernels.attention.kernels import KEY_MULTIPLE
from nvfp4_kernels.attention.sm100.choose import MAX_SPLITS, AttentionProblem, choose_config
from nvfp4_kernels.attention.sm100.tile import BARRIER_BYTES, KEYS, AttentionTile

SM_SHARED, SM_COLUMNS = 228 * 1024, 512
HEAD_DIMS = tuple(range(16, 257, 16))
PREFILL = AttentionProblem(1, 4096, 4096, 8, 4, 128)
DECODE = AttentionProblem(1, 1, 8192, 8, 4, 128)


def tiles() -> list[AttentionTile]:
    found = []
    for head_dim, count, fp8, ctas, split in itertools.product(
        HEAD_DIMS, (1, 2), (False, True), (1, 2), (False, True)
    ):
        try:
            tile = AttentionTile(head_dim, count, fp8, ctas_per_sm=ctas, warp_split_kv=split)
        except AssertionError:
            continue
        found.append(tile)
    return found


def test_what_there_is() -> None:
    there_is = {(t.head_dim, t.query_tiles, t.fp8) for t in tiles()}
    for head_dim in HEAD_DIMS:
        assert (head_dim, 1, False) in there_is
        assert ((head_dim, 2, False) in there_is) == (head_dim <= 128)
        assert ((head_dim, 1, True) in there_is) == (head_dim % 32 == 0)


@pytest.mark.parametrize("tile", tiles(), ids=str)
def test_columns_are_apart(tile: AttentionTile) -> None:
    spans = []
    for each in range(tile.query_tiles):
        for stage in range(tile.s_stages):
            spans.append((tile.s_column(each, stage), KEYS))
            inside = tile.p_column(each, stage) - tile.s_column(each, stage)
            if not tile.separate_p:
                assert 0 <= inside <= KEYS - tile.p_columns
        if tile.separate_p:
            spans.append((tile.p_column(each), tile.p_columns))
        spans.append((tile.o_column(each), tile.head_dim))
    spans.sort()
    for (first, width), (second, _) in itertools.pairwise(spans):
        assert first + width <= second
    assert sum(spans[-1]) <= tile.tensor_columns <= SM_COLUMNS // tile.ctas_per_sm


@pytest.mark.parametrize("tile", tiles(), ids=str)
def test_shared_memory(tile: AttentionTile) -> None:
    used = tile.query_tiles * tile.query_bytes + tile.stages * tile.stage_bytes
    assert (used + BARRIER_BYTES + 1024) * tile.ctas_per_sm <= SM_SHARED
    assert tile.stages >= 2
    assert tile.chunks * tile.chunk_bytes == tile.row_bytes


@pytest.mark.parametrize("tile", [tile for tile in tiles() if tile.warp_split_kv], ids=str)
def test_warp_split_kv(tile: AttentionTile) -> None:
    """32 rows, a quarter of the keys per warp; Q's memory stages 8 or more columns of O at once."""
    assert tile.query_tiles == 1
    assert (tile.rows, 4 * tile.warp_keys) == (32, KEYS)
    assert tile.row_bytes % 32 == 0
    assert tile.head_dim * 4 % tile.row_bytes == 0


def test_few_rows_split_keys_over_warps() -> None:
    for queries, group in ((1, 32), (1, 1), (8, 4), (5, 6)):
        assert choose_config(replace(DECODE, queries=queries, group=group))[0].warp_split_kv
    for queries, group in ((1, 33), (9, 4), (128, 1)):
        assert not choose_config(replace(DECODE, queries=queries, group=group))[0].warp_split_kv


def test_prefill_has_two_query_tiles() -> None:
    for head_dim in HEAD_DIMS:
        tile, splits = choose_config(replace(PREFILL, head_dim=head_dim))
        assert tile.query_tiles == (2 if head_dim <= 128 else 1)
        assert splits == 1


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("batch", [1, 3, 16, 64, 300])
def test_decode_fills_the_device(batch: int, head_dim: int, fp8: bool) -> None:
    problem = replace(DECODE, batch=batch, head_dim=head_dim, fp8=fp8)
    tile, splits = choose_config(problem)
    assert tile.query_tiles == 1
    ctas = batch * problem.kv_heads
    places = 148 * tile.ctas_per_sm
    assert splits == MAX_SPLITS or ctas * (splits + 1) > places or splits == 16
    # More than one wave only where the last wave would be a small one.
    assert splits == 1 or ctas * splits <= places or 0 < ctas % places < places // 2


@pytest.mark.parametrize(
    ("batch", "keys", "expected"),
    [(18, 4096, 1), (20, 4096, 2), (20, 16384, 4), (37, 4096, 1), (64, 4096, 1), (20, 512, 1)],
)
def test_a_small_last_wave_is_split(batch: int, keys: int, expected: int) -> None:
    """160 CTAs on 148 SMs would take two waves; 144 take one, 296 two full waves."""
    assert choose_config(replace(DECODE, batch=batch, keys=keys))[1] == expected


def test_short_sequences_are_not_split() -> None:
    for keys in (0, 1, 128, 512, 896):
        assert choose_config(replace(DECODE, keys=keys))[1] == 1
    assert choose_config(replace(DECODE, window=512))[1] == 1


@pytest.mark.parametrize(
    ("tokens", "width", "splits"),
    [
        *((1, 2048, 8), (18, 2048, 8), (32, 2048, 4), (100, 2048, 1), (2048, 2048, 1)),
        *((1, 4096, 16), (1, 512, 2), (1, 384, 1), (1, 0, 1)),
    ],
)
def test_lists_are_split(tokens: int, width: int, splits: int) -> None:
    """A token's query heads share one CTA; gathers are slow, so splits of two tiles pay."""
    problem = AttentionProblem(tokens, 1, width, 1, 128, 128, indexed=True)
    tile, chosen = choose_config(problem)
    assert tile.query_tiles == 1
    assert chosen == splits


def test_nothing_to_do() -> None:
    for problem in (replace(DECODE, batch=0), replace(DECODE, queries=0)):
        assert choose_config(problem)[1] == 1


@pytest.mark.parametrize("window", [0, 1, 500, 4096])
@pytest.mark.parametrize("batch", [1, 3, 40])
def test_lengths_of_one_multiple_are_alike(batch: int, window: int) -> None:
    """Key counts that round up to the same multiple get the same tile and splits."""
    for queries, fp8 in ((1, False), (1, True), (300, False)):
        problem = replace(DECODE, batch=batch, queries=queries, window=window, fp8=fp8)
        for most in (KEY_MULTIPLE, 17 * KEY_MULTIPLE, 64 * KEY_MULTIPLE):
            chosen = {
                choose_config(replace(problem, keys=keys))
                for keys in (most - KEY_MULTIPLE + 1, most - 1, most)
            }
            assert len(chosen) == 1
