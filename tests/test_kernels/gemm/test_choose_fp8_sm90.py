"""Choice of a product's tile on sm_90 for E4M3 tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvfp4_kernels.gemm.sm90.choose import Problem
from nvfp4_kernels.gemm.sm90.choose_fp8 import (
    all_configs,
    choose_batch_invariant,
    choose_config,
    choose_grouped_config,
    estimate,
    fits,
    many_token_configs,
)
from nvfp4_kernels.gemm.sm90.choose_grouped import GroupedProblem
from nvfp4_kernels.gemm.sm90.tile import EpilogueConfig
from nvfp4_kernels.moe.routing import TILE_TOKENS
from nvfp4_kernels.sm90.limits import MAX_SHARED_BYTES

OUTPUTS = ("bfloat16", "float32", "float8_e4m3fn")
SIZES = st.integers(1, 40_000)


def output(dtype: str = "bfloat16") -> EpilogueConfig:
    return EpilogueConfig(act="float8_e4m3fn", dtype=dtype)  # type: ignore[arg-type]


@given(
    st.integers(1, 20_000), SIZES, st.integers(1, 600), st.sampled_from((1, 2)),
    st.sampled_from(OUTPUTS), st.sampled_from((choose_config, choose_batch_invariant)),
)  # fmt: skip
def test_every_problem_gets_a_tile_that_serves_it(
    m: int, n: int, groups: int, weights: int, dtype: str, choose: object
) -> None:
    problem = Problem(m, n, 64 * groups, weights)
    tile, chosen = choose(problem, output(dtype))  # type: ignore[operator]
    assert fits(problem, tile, chosen)
    assert tile.fp8
    assert tile.weights == weights
    shared = tile.depth(chosen.shared_bytes(tile)) * tile.stage_bytes + chosen.shared_bytes(tile)
    assert shared * tile.ctas_per_sm <= MAX_SHARED_BYTES
    assert tile.threads * tile.ctas_per_sm <= 2048
    if choose is choose_batch_invariant:
        assert tile.parts == 1


@given(
    st.integers(1, 500), st.sampled_from(TILE_TOKENS), st.integers(1, 256), SIZES,
    st.integers(1, 200), st.sampled_from((1, 2)), st.sampled_from(OUTPUTS),
)  # fmt: skip
def test_every_grouped_problem_gets_a_tile_that_serves_it(
    tiles: int, tokens: int, experts: int, n: int, groups: int, weights: int, dtype: str
) -> None:
    problem = GroupedProblem(tiles, tokens, experts, n, 64 * groups, weights)
    tile, chosen = choose_grouped_config(problem, output(dtype))
    assert (tile.tokens, tile.weights, tile.grouped, tile.fp8) == (tokens, weights, True, True)
    assert tile.depth(chosen.shared_bytes(tile)) >= tile.least_stages


@pytest.mark.parametrize(
    ("m", "n", "k", "weights", "tokens", "warpgroups", "split"),
    [
        (1, 6144, 4096, 1, 8, 2, 2),
        (16, 4096, 14336, 1, 16, 4, 2),
        (32, 14336, 4096, 2, 32, 1, 1),
        (64, 8192, 7168, 1, 64, 1, 2),
        (128, 4096, 14336, 1, 128, 1, 2),
        (256, 6144, 4096, 1, 256, 1, 1),
        (1024, 4096, 4096, 1, 256, 2, 1),
        (1024, 2560, 8192, 1, 192, 2, 1),
        (8192, 4096, 14336, 1, 256, 2, 1),
    ],
)
def test_what_was_fastest_on_an_h200(
    m: int, n: int, k: int, weights: int, tokens: int, warpgroups: int, split: int
) -> None:
    tile, _ = choose_config(Problem(m, n, k, weights), output())
    assert (tile.tokens, tile.warpgroups, tile.split_k) == (tokens, warpgroups, split)


def test_gate_and_up_are_apart_where_a_warpgroup_has_no_room_for_both() -> None:
    tile, _ = choose_config(Problem(8192, 14336, 4096, 2), output())
    assert (tile.tokens, tile.weight_per_warpgroup) == (256, True)


def test_many_tokens_get_the_least_estimate() -> None:
    problem = Problem(1000, 4096, 4096)
    tile, _ = choose_config(problem, output())
    found = many_token_configs(problem, output())
    assert estimate(problem, tile) == min(estimate(problem, each) for each, _ in found)


@pytest.mark.parametrize("weights", [1, 2])
def test_all_configs_are_those_of_every_number_of_tokens(weights: int) -> None:
    found = all_configs(4096, 4096, weights, output(), 600)
    each = {choose_config(Problem(m, 4096, 4096, weights), output()) for m in range(1, 601)}
    assert set(found) == each
