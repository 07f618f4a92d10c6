"""Choice of a product's tile on sm_90."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvfp4_kernels.gemm.sm90.choose import (
    Problem,
    choose_config,
    ctas,
    estimate,
    fits,
    many_token_configs,
)
from nvfp4_kernels.gemm.sm90.tile import MAX_STAGES, EpilogueConfig, Tile
from nvfp4_kernels.sm90.limits import MAX_SHARED_BYTES, SMS

SIZES = st.integers(1, 40_000)


@given(
    st.integers(1, 20_000), SIZES, st.integers(1, 2500), st.sampled_from((1, 2)),
    st.sampled_from(("bfloat16", "float16", "float32")),
)  # fmt: skip
def test_every_problem_gets_a_tile_that_serves_it(
    m: int, n: int, blocks: int, weights: int, dtype: str
) -> None:
    problem = Problem(m, n, 16 * blocks, weights)
    tile, output = choose_config(problem, EpilogueConfig(dtype=dtype))  # type: ignore[arg-type]
    assert fits(problem, tile, output)
    assert tile.weights == weights
    assert not output.boxes or (n % 8 == 0 and dtype != "float32" and tile.split_k == 1)
    shared = tile.depth(output.shared_bytes(tile)) * tile.stage_bytes + output.shared_bytes(tile)
    assert shared * tile.ctas_per_sm <= MAX_SHARED_BYTES
    assert tile.threads * tile.ctas_per_sm <= 2048


@pytest.mark.parametrize("m", [1, 8, 9, 16, 17, 32, 33, 64])
def test_few_tokens_fill_one_tile(m: int) -> None:
    tile, _ = choose_config(Problem(m, 4096, 4096), EpilogueConfig())
    assert m <= tile.tokens < max(9, 2 * m)


def test_few_tokens_reach_most_sms_at_once() -> None:
    for n, k, weights in (
        (4096, 4096, 1), (14336, 4096, 2), (4096, 14336, 1),
        (2560, 8192, 1), (8192, 2048, 1), (7168, 8192, 2), (8192, 7168, 1),
    ):  # fmt: skip
        problem = Problem(1, n, k, weights)
        tile, _ = choose_config(problem, EpilogueConfig())
        assert 0.9 * SMS <= ctas(problem, tile) <= SMS * tile.ctas_per_sm


def test_three_quarters_of_the_sms_where_that_was_faster_in_a_layer() -> None:
    problem = Problem(1, 6144, 4096)
    tile, _ = choose_config(problem, EpilogueConfig())
    assert (ctas(problem, tile), tile.ctas_per_sm) == (96, 1)


@pytest.mark.parametrize(("m", "tokens"), [(320, 160), (448, 224)])
def test_widths_between_leave_less_of_the_last_tiles_empty(m: int, tokens: int) -> None:
    for weights in (1, 2):
        tile, _ = choose_config(Problem(m, 7168, 4096, weights), EpilogueConfig())
        assert tile.tokens == tokens


def test_many_tokens_get_the_least_estimate() -> None:
    problem = Problem(1000, 4096, 4096)
    tile, _ = choose_config(problem, EpilogueConfig())
    least = min(
        estimate(problem, each) for each, _ in many_token_configs(problem, EpilogueConfig())
    )
    assert estimate(problem, tile) == least


@pytest.mark.parametrize(
    ("m", "n", "k", "weights", "tokens", "split"),
    [
        (4096, 4096, 4096, 1, 256, 1),
        (4096, 14336, 4096, 2, 256, 1),
        (192, 14336, 4096, 2, 192, 1),
        (128, 14336, 4096, 2, 128, 1),
        (256, 4096, 14336, 1, 128, 2),
        (128, 4096, 4096, 1, 64, 2),
        (1, 4096, 14336, 1, 8, 2),
        (16, 4096, 14336, 1, 16, 2),
        (32, 4096, 14336, 1, 32, 2),
        (320, 4096, 14336, 1, 160, 2),
        (512, 2560, 8192, 1, 176, 2),
        (1024, 2560, 8192, 1, 176, 1),
        (8192, 8192, 7168, 1, 256, 1),
    ],
)
def test_what_was_fastest_on_an_h200(
    m: int, n: int, k: int, weights: int, tokens: int, split: int
) -> None:
    tile, _ = choose_config(Problem(m, n, k, weights), EpilogueConfig())
    assert (tile.tokens, tile.split_k) == (tokens, split)


def test_pairs_are_apart_where_a_warpgroup_has_no_room_for_both() -> None:
    problem = Problem(8192, 14336, 4096, 2)
    found = many_token_configs(problem, EpilogueConfig())
    assert {tile.tokens for tile, _ in found if tile.weight_per_warpgroup} == {
        96,
        128,
        160,
        192,
        224,
        256,
    }
    assert all(tile.weight_per_warpgroup for tile, _ in found if tile.tokens > 128)


def test_a_pair_apart_may_be_faster_where_there_is_room_too() -> None:
    tile, _ = choose_config(Problem(128, 7168, 8192, 2), EpilogueConfig())
    assert (tile.tokens, tile.weight_per_warpgroup, tile.k_tiles) == (128, True, 2)


def test_stages_belong_to_one_slice_each() -> None:
    assert Tile(8, warpgroups=2, slices=2, max_stages=5).depth(0) == 4


def test_k_tiles_divide_k() -> None:
    tile, _ = choose_config(Problem(1, 4096, 64 * 5), EpilogueConfig())
    assert tile.k_tiles == 1
    assert tile.split_k <= 5


def test_shorter_stages_are_more_of_them() -> None:
    rings = []
    for k in (4096, 4096 + 64):  # 65 K tiles: no stage of several K tiles divides them
        tile, output = choose_config(Problem(16, 4096, k), EpilogueConfig())
        rings.append((tile.k_tiles, tile.k_tiles * tile.depth(output.shared_bytes(tile))))
    (long, wanted), (short, got) = rings
    assert (long, short) == (8, 1)
    assert got == min(wanted, MAX_STAGES)


def test_a_ring_of_large_stages_is_short_where_all_run_at_once() -> None:
    def stages(m: int) -> tuple[int, int]:
        problem = Problem(m, 4096, 4096)
        found = many_token_configs(problem, EpilogueConfig())
        tile, output = next(
            (t, o) for t, o in found if (t.tokens, t.k_tiles, t.split_k) == (64, 2, 1)
        )
        return math.ceil(ctas(problem, tile) / SMS), tile.depth(output.shared_bytes(tile))

    assert stages(128) == (1, 4)
    assert stages(4096) == (16, 7)


@pytest.mark.parametrize(
    "fields",
    [
        {"tokens": 12},
        {"tokens": 264},
        {"tokens": 256, "weights": 2},
        {"split_k": 16},
        {"slices": 3},
        {"parts_in_turn": 2, "split_k": 2},
        {"parts_in_turn": 2, "tokens": 136},
        {"tokens": 40, "slices": 2},
        {"tokens": 64, "weight_per_warpgroup": True},
        {"tokens": 48, "weights": 2, "weight_per_warpgroup": True},
    ],
)
def test_tiles_that_cannot_be(fields: dict[str, int]) -> None:
    with pytest.raises(AssertionError):
        Tile(**{"tokens": 8} | fields)
