"""Choice of a GEMM's tile on sm_100: pure arithmetic, no CuTe."""

from dataclasses import replace
from itertools import product

import pytest

from nvfp4_kernels.devices import assumed_clusters
from nvfp4_kernels.gemm.sm100.choose import (
    MAX_FEW_TOKENS,
    MAX_SWAP_AB_TOKENS,
    Problem,
    candidates,
    choose_config,
    cost_in_layer,
    estimate,
    fits,
    with_store,
)
from nvfp4_kernels.gemm.sm100.tile import EpilogueConfig, Tile

BF16, NVFP4 = EpilogueConfig("bfloat16"), EpilogueConfig("nvfp4")
PAIRS_OF_96 = Tile(96, 2, two_cta=True, cluster_m=2)
LLAMA = {
    "qkv": (6144, 4096, 1),
    "o": (4096, 4096, 1),
    "mlp": (14336, 4096, 2),
    "down": (4096, 14336, 1),
}
TOKENS = (1, 2, 8, 9, 16, 17, 32, 33, 64, 128, 129, 256, 512, 1000, 4096, 8192, 65536)


@pytest.mark.parametrize(
    "output", [BF16, NVFP4, EpilogueConfig("float32", shards=3, bias="float32")], ids=str
)
@pytest.mark.parametrize("layer", LLAMA)
def test_every_token_count_has_a_tile_that_fits(layer: str, output: EpilogueConfig) -> None:
    n, k, weights = LLAMA[layer]
    for m in TOKENS:
        problem = Problem(m, n, k, weights=weights)
        tile, out = choose_config(problem, replace(output, shards=1) if weights == 2 else output)
        assert tile.weights == weights
        assert tile.swap_ab or m > MAX_FEW_TOKENS
        assert not tile.swap_ab or m <= MAX_SWAP_AB_TOKENS
        assert not tile.swap_ab or m <= tile.columns * (1 if m <= MAX_FEW_TOKENS else 4)
        used = tile.depth(out.shared_bytes(tile)) * tile.stage_bytes + out.shared_bytes(tile)
        assert used + 1024 <= 227 * 1024
        assert tile.depth(out.shared_bytes(tile)) >= 2
        assert tile.tensor_columns <= 512
        assert tile.scale_column + tile.scale_columns <= tile.tensor_columns


@pytest.mark.parametrize(
    "shape", list(product((1, 3, 40, 300), (1, 7, 16, 130), (16, 48, 64, 1040))), ids=str
)
def test_odd_shapes_have_one_too(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    assert choose_config(Problem(m, n, k), BF16)
    assert choose_config(Problem(m, n, k, batch=3, weights=2), BF16)


def test_what_costs_a_layer_least_is_chosen() -> None:
    problem = Problem(128, 4096, 7168)
    chosen = choose_config(problem, BF16)
    assert cost_in_layer(problem, *chosen) == min(
        cost_in_layer(problem, *each) for each in candidates(problem, BF16)
    )


def test_the_least_estimate_is_chosen_for_many_tokens() -> None:
    problem = Problem(512, 4096, 7168)
    chosen, _ = choose_config(problem, BF16)
    assert estimate(problem, chosen) == min(
        estimate(problem, t) for t, _ in candidates(problem, BF16)
    )


@pytest.mark.parametrize("tokens", [1, 8, 16, 32])
def test_weights_that_a_ring_holds_do_not_wait_for_the_tokens(tokens: int) -> None:
    """Rings can prefetch only half of o_proj with K whole, so split-K of 2 saves layer time."""
    problem = Problem(tokens, 4096, 4096)
    tile, output = choose_config(problem, BF16)
    assert tile.split_k == 2
    whole = replace(tile, split_k=1)
    assert 4096 // 256 > whole.depth(output.shared_bytes(whole)) >= 4096 // 256 // 2
    waiting = [cost_in_layer(problem, t, output) - estimate(problem, t) for t in (whole, tile)]
    assert waiting[0] > 1.1 * waiting[1]


def test_few_rows_of_weights_are_split_over_more_sms() -> None:
    tile, _ = choose_config(Problem(1, 4096, 14336), BF16)
    assert 4096 // 128 * tile.split_k >= 128


def test_large_products_take_pairs_of_sms() -> None:
    assert choose_config(Problem(8192, 4096, 14336), BF16)[0].two_cta
    assert choose_config(Problem(8192, 14336, 4096, weights=2), BF16)[0].two_cta


def test_results_leave_in_boxes_where_rows_allow_it() -> None:
    assert with_store(BF16, Tile(128), 4096).store == "tma"
    assert with_store(BF16, Tile(128), 4100).store == "element"
    assert with_store(BF16, Tile(128, split_k=4), 4096).store == "vector"
    assert with_store(NVFP4, Tile(128), 4096).store == "vector"
    assert with_store(NVFP4, Tile(128), 4112).store == "element"
    assert with_store(BF16, Tile(8, swap_ab=True), 4096).store == "element"
    assert with_store(BF16, Tile(64, swap_ab=True), 4096).store == "element"
    assert with_store(NVFP4, Tile(64, swap_ab=True), 4096).store == "element"


def test_what_goes_out_at_once_is_a_whole_part_of_a_tile() -> None:
    assert fits(
        Problem(512, 3072, 7168, weights=2), PAIRS_OF_96, with_store(BF16, PAIRS_OF_96, 3072)
    )
    assert not fits(
        Problem(512, 3072, 7168, weights=2), PAIRS_OF_96, with_store(NVFP4, PAIRS_OF_96, 3072)
    )


def test_tiles_of_96_columns_reach_into_two_atoms() -> None:
    assert [Tile(columns).atoms_n for columns in (8, 64, 96, 128, 256)] == [1, 1, 2, 1, 2]


def test_a_tile_leaves_in_two_boxes_at_least() -> None:
    """A tile is stored as at least two boxes: one is stored while the next is computed."""
    assert with_store(BF16, Tile(128), 4096).box_bytes == 128
    assert with_store(BF16, Tile(64), 4096).box_bytes == 64
    assert with_store(EpilogueConfig("float32"), Tile(64), 4096).box_bytes == 128


@pytest.mark.parametrize(
    ("sms", "ctas", "clusters"),
    [(148, 1, 148), (148, 2, 74), (148, 4, 34), (148, 8, 16), (1, 2, 1)],
)
def test_clusters_lie_in_one_gpc(sms: int, ctas: int, clusters: int) -> None:
    assert assumed_clusters(sms, ctas) == clusters


@pytest.mark.parametrize(("n", "weights"), [(6144, 1), (14336, 2)], ids=["qkv", "gate and up"])
def test_pairs_where_the_mmas_wait_for_shared_columns(n: int, weights: int) -> None:
    """Clusters of four leave 12 SMs idle, and loads are not the bottleneck."""
    problem = Problem(8192, n, 4096, weights=weights)
    fours, pairs = (
        next(tile for tile, _ in candidates(problem, BF16) if (tile.cluster_m, tile.overlap) == of)
        for of in ((4, 48), (2, 48))
    )
    assert choose_config(problem, BF16)[0] == pairs
    assert estimate(problem, pairs) < estimate(problem, fours)
    deep = replace(problem, k=65536)  # a tile's loads take longer than its wait
    assert estimate(deep, fours) < estimate(deep, pairs)


def test_overlapping_accumulators_leave_room_for_the_scales() -> None:
    wide = Tile(256)
    assert (wide.accumulators, wide.overlap, wide.tensor_columns) == (2, 48, 512)
    assert wide.accumulator_stride == 256 - 48
    assert wide.scale_column == 512 - wide.scale_columns
    assert Tile(128).overlap == 0
