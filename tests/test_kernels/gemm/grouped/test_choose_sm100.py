"""Choice of a grouped product's tile: pure arithmetic, no CuTe."""

from itertools import product

import pytest

from nvfp4_kernels.gemm.sm100.choose_grouped import (
    GroupedProblem,
    choose_grouped,
    choose_tile_tokens,
    estimate_grouped,
    grouped_candidates,
)
from nvfp4_kernels.gemm.sm100.tile import EpilogueConfig
from nvfp4_kernels.moe.routing import TILE_TOKENS, max_tiles

BF16, NVFP4 = EpilogueConfig("bfloat16"), EpilogueConfig("nvfp4")


@pytest.mark.parametrize(
    "output", [BF16, NVFP4, EpilogueConfig("float32", row_scale=True)], ids=str
)
@pytest.mark.parametrize("tile_tokens", TILE_TOKENS)
def test_tiles_fit(tile_tokens: int, output: EpilogueConfig) -> None:
    """Every size has a tile, and a token tile is a whole number of its rows or columns."""
    for n, k, weights, terms in product((16, 96, 2048), (32, 7168), (1, 2), (1, 3)):
        problem = GroupedProblem(tile_tokens, n, k, 9, 4, weights, terms)
        for tile, out in [choose_grouped(problem, output), *grouped_candidates(problem, output)]:
            assert tile.grouped
            assert tile.weights == weights
            assert tile_tokens % (tile.columns if tile.swap_ab else tile.rows) == 0
            assert tile.depth(out.shared_bytes(tile)) >= 2
            assert tile.tensor_columns <= 512


def deepseek(tokens: int, ranks: int = 8) -> tuple[GroupedProblem, GroupedProblem]:
    """Both products of DeepSeek-V3's layers on one of ``ranks`` ranks."""
    local = 256 // ranks
    tile_tokens = choose_tile_tokens(tokens, 8, local, 256, 2048, 7168)
    tiles = int(max_tiles(8 * tokens, local, tile_tokens))
    return (
        GroupedProblem(tile_tokens, 2048, 7168, tiles, local, 2),
        GroupedProblem(tile_tokens, 7168, 2048, tiles, local),
    )


def test_an_experts_tokens_fill_one_tile() -> None:
    tokens = (1, 64, 256, 1024, 4096, 65536)
    assert [deepseek(m)[0].tile_tokens for m in tokens] == [8, 8, 8, 32, 128, 256]


def test_few_tiles_are_split_over_the_sms() -> None:
    """One expert's gate and up projections are 16 tiles for 148 SMs."""
    first, second = deepseek(1)
    assert choose_grouped(first, NVFP4)[0].split_k >= 4
    assert choose_grouped(second, BF16)[0].split_k == 1


def test_a_last_wave_of_few_tiles_is_split() -> None:
    """448 tiles are three waves of 148 SMs and four more tiles."""
    first, _ = deepseek(64)
    tile, _ = choose_grouped(first, NVFP4)
    assert tile.split_k > 1
    whole = next(t for t, _ in grouped_candidates(first, NVFP4) if t.split_k == 1)
    assert estimate_grouped(first, tile, used=28) < 0.97 * estimate_grouped(first, whole, used=28)


def test_few_large_experts_get_pairs_of_ctas() -> None:
    """The time model puts CTA pairs ahead by 2 to 20 % for these products."""
    for experts, tokens, n, k in (
        (8, 1024, 4096, 7168),
        (8, 1024, 7168, 2048),
        (2, 512, 3072, 4096),
    ):
        problem = GroupedProblem(128, n, k, int(max_tiles(tokens, experts, 128)), experts)
        assert choose_grouped(problem, BF16)[0].two_cta


def test_what_is_chosen_loses_little_whatever_is_in_use() -> None:
    for tokens, ranks in product((1, 8, 64, 256, 1024), (1, 8)):
        for problem, output in zip(deepseek(tokens, ranks), (NVFP4, BF16), strict=True):
            chosen, _ = choose_grouped(problem, output)
            for used in {1, problem.tiles // 3 + 1, problem.tiles}:
                costs = [
                    estimate_grouped(problem, tile, used)
                    for tile, _ in grouped_candidates(problem, output)
                ]
                assert estimate_grouped(problem, chosen, used) < 1.75 * min(costs)
