"""Choice of a grouped product's tile on sm_90, and of a layer's tokens per tile."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvfp4_kernels.gemm.sm90.choose import Problem, fits
from nvfp4_kernels.gemm.sm90.choose_grouped import (
    GroupedProblem,
    choose_grouped_config,
    choose_tile_tokens,
    expected_tiles,
)
from nvfp4_kernels.gemm.sm90.tile import EpilogueConfig
from nvfp4_kernels.moe.routing import TILE_TOKENS, max_tiles
from nvfp4_kernels.sm90.limits import MAX_SHARED_BYTES, REGISTERS, SMS

# Experts of all ranks, top-k, intermediate size and hidden size.
QWEN3_30B, DEEPSEEK = (128, 8, 768, 2048), (256, 8, 2048, 7168)


@given(
    st.integers(1, 4000), st.sampled_from(TILE_TOKENS), st.integers(1, 400),
    st.integers(1, 8000), st.integers(1, 600), st.sampled_from((1, 2)),
    st.sampled_from(("bfloat16", "float16", "float32")), st.sampled_from((1, 2, 8, 64)),
)  # fmt: skip
def test_every_problem_gets_a_tile_that_serves_it(
    tiles: int, tokens: int, experts: int, n: int, blocks: int, weights: int, dtype: str, ranks: int
) -> None:
    problem = GroupedProblem(tiles, tokens, experts, n, 16 * blocks, weights, ranks * experts)
    tile, output = choose_grouped_config(problem, EpilogueConfig(dtype=dtype))  # type: ignore[arg-type]
    assert tile.grouped
    assert not tile.routed_before
    assert (tile.tokens, tile.weights) == (tokens, weights)
    assert fits(Problem(tiles * tokens, n, 16 * blocks, weights), tile, output)
    assert not output.boxes or (n % 8 == 0 and dtype != "float32" and tile.parts == 1)
    shared = tile.depth(output.shared_bytes(tile)) * tile.stage_bytes + output.shared_bytes(tile)
    assert shared * tile.ctas_per_sm <= MAX_SHARED_BYTES
    assert tile.threads * tile.ctas_per_sm <= 2048
    # Accumulators and decoded weights stay in registers; with many tokens one CTA fills an SM.
    assert tokens >= 64 or tile.columns // 2 + 60 <= REGISTERS // (tile.threads * tile.ctas_per_sm)


@given(st.integers(0, 3000), st.integers(1, 300), st.sampled_from(TILE_TOKENS))
def test_tiles_tell_how_many_slots_there_are(slots: int, experts: int, tokens: int) -> None:
    problem = GroupedProblem(max_tiles(slots, experts, tokens), tokens, experts, 64, 64)
    assert problem.slots <= slots < problem.slots + tokens


@pytest.mark.parametrize("tokens", TILE_TOKENS)
@pytest.mark.parametrize("slots", [1, 8, 300, 2000, 60_000])
def test_expected_tiles_are_those_of_slots_that_choose_at_random(slots: int, tokens: int) -> None:
    experts = 64
    rng = np.random.default_rng(0)
    counts = [np.bincount(rng.integers(0, experts, slots), minlength=experts) for _ in range(200)]
    mean = np.mean([np.ceil(each / tokens).sum() for each in counts])
    assert expected_tiles(slots, experts, tokens) == pytest.approx(mean, rel=0.05)
    assert expected_tiles(slots, experts, tokens) <= max_tiles(slots, experts, tokens)


def test_no_slots_need_no_tiles() -> None:
    assert expected_tiles(0, 8, 8) == expected_tiles(8, 0, 8) == 0
    assert choose_tile_tokens(0, 8, 16, 128, 768, 2048) == 8


@pytest.mark.parametrize(
    ("tokens", "tile_tokens"),
    [(1, 8), (8, 8), (64, 8), (128, 16), (256, 32), (512, 64), (1024, 128), (8192, 256)],
)
def test_tiles_hold_what_an_expert_gets(tokens: int, tile_tokens: int) -> None:
    experts, top_k, n, k = QWEN3_30B
    assert choose_tile_tokens(tokens, top_k, experts, experts, n, k) == tile_tokens


def test_ranks_that_share_experts_have_the_tiles_of_one_with_all() -> None:
    experts, top_k, n, k = DEEPSEEK
    for tokens in (1, 64, 1024, 8192):
        alone, shared = (
            choose_tile_tokens(tokens, top_k, held, experts, n, k) for held in (experts, 32)
        )
        assert alone == shared


@pytest.mark.parametrize("weights", [1, 2])
def test_several_ctas_to_an_sm_where_there_are_hundreds_of_tiles(weights: int) -> None:
    experts, top_k, n, k = QWEN3_30B
    n, k = (n, k) if weights == 2 else (k, n)
    for tokens in (8, 64):
        problem = GroupedProblem(max_tiles(tokens * top_k, experts, 8), 8, experts, n, k, weights)
        tile, output = choose_grouped_config(problem, EpilogueConfig())
        assert (tile.ctas_per_sm, tile.rows, tile.parts) == (1 + weights, 128 // weights, 1)
        # Each CTA has its ring: bytes in flight per SM.
        under_way = tile.depth(output.shared_bytes(tile)) * tile.stage_bytes * tile.ctas_per_sm
        assert under_way > 64 * 1024


@pytest.mark.parametrize("weights", [1, 2])
def test_one_token_keeps_every_sm_busy(weights: int) -> None:
    experts, top_k, n, k = QWEN3_30B
    n, k = (n, k) if weights == 2 else (k, n)
    tile, _ = choose_grouped_config(
        GroupedProblem(top_k, 8, experts, n, k, weights), EpilogueConfig()
    )
    ctas = top_k * math.ceil(n / tile.rows)
    assert ctas <= SMS * tile.ctas_per_sm
    assert 4 * ctas >= 2.5 * SMS / (tile.slices / 4)
    assert tile.slices * tile.ctas_per_sm == 4


def of_rank(tokens: int, weights: int, global_experts: int | None) -> GroupedProblem:
    """A product on one of 8 ranks of DeepSeek-V3; ``global_experts``: see ``GroupedProblem``."""
    experts, top_k, n, k = DEEPSEEK
    n, k = (n, k) if weights == 2 else (k, n)
    tiles = max_tiles(tokens * top_k, experts // 8, 8)
    return GroupedProblem(tiles, 8, experts // 8, n, k, weights, global_experts)


@pytest.mark.parametrize(("tokens", "used", "slices"), [(1, 1, 4), (2, 2, 4), (4, 4, 4), (8, 8, 2)])
def test_a_rank_has_the_tile_of_its_own_slots(tokens: int, used: int, slices: int) -> None:
    """Told the number of all experts, the chooser expects few tiles: warpgroups share rows."""
    told, untold = (of_rank(tokens, 2, experts) for experts in (256, None))
    assert told.used == used < untold.used
    assert told.slots == untold.slots == 8 * tokens  # memory for all of them
    tile, _ = choose_grouped_config(told, EpilogueConfig())
    assert tile.slices == slices
    assert choose_grouped_config(untold, EpilogueConfig())[0].slices < slices


@pytest.mark.parametrize("tokens", [1, 2, 4, 8])
def test_slices_do_not_pay_where_most_ctas_start_in_vain(tokens: int) -> None:
    """Each tile of capacity starts 112 CTAs; only one CTA in eight has work, of 32 K tiles."""
    tile, _ = choose_grouped_config(of_rank(tokens, 1, 256), EpilogueConfig())
    assert tile.parts == 1
    # Slices pay on a rank with all experts, where a CTA starts for each tile in use.
    alone = GroupedProblem(tokens, 8, 256, 7168, 2048)
    assert tokens > 2 or choose_grouped_config(alone, EpilogueConfig())[0].slices > 1


@pytest.mark.parametrize("weights", [1, 2])
def test_all_experts_are_those_of_one_rank(weights: int) -> None:
    experts, top_k, n, k = QWEN3_30B
    n, k = (n, k) if weights == 2 else (k, n)
    for tokens in (1, 2, 3, 4, 8, 64):
        tiles = max_tiles(tokens * top_k, experts, 8)
        told, untold = (
            GroupedProblem(tiles, 8, experts, n, k, weights, each) for each in (experts, None)
        )
        assert choose_grouped_config(told, EpilogueConfig()) == (
            choose_grouped_config(untold, EpilogueConfig())
        )
