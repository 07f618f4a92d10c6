"""Chooser of the GEMM tile for E4M3 tokens and folded weights. Pure functions; imports no CuTe.

Table and estimate were tuned on an H200, on the products of Llama 8B and of Llama 70B on four GPUs,
each in a chain of launches of the same product, with weights that rotate past L2.
"""

import functools
import itertools
import math
from dataclasses import replace
from typing import NamedTuple

from nvfp4_kernels.formats.folded import TILE_K, TILE_ROWS
from nvfp4_kernels.gemm.sm90.choose import MANY_TOKENS, Problem, ctas, nearest, with_store
from nvfp4_kernels.gemm.sm90.choose_grouped import GroupedProblem
from nvfp4_kernels.gemm.sm90.tile import EpilogueConfig, Tile
from nvfp4_kernels.sm90.limits import REGISTERS, SMS

_FEW_TOKENS = (8, 16, 32, MANY_TOKENS)


class _Cut(NamedTuple):
    """Fields of a ``Tile`` that the table for few tokens contains, in its order."""

    warpgroups: int
    slices: int
    k_tiles: int
    split_k: int
    ctas_per_sm: int


# By weights, rows of 64 and K / 128: the fastest tiles with up to 8, 16, 32 and 64 tokens; the
# nearest entry counts.
_FEW_TOKEN_CUTS = {
    (1, 40, 64): ((2, 2, 4, 4, 2), (2, 2, 2, 4, 2), (1, 1, 2, 8, 3), (1, 1, 1, 8, 3)),
    (1, 64, 32): ((1, 1, 1, 2, 1), (2, 2, 1, 2, 1), (1, 1, 1, 2, 1), (1, 1, 1, 2, 1)),
    (1, 64, 112): ((4, 4, 2, 2, 1), (4, 4, 2, 2, 1), (1, 1, 4, 2, 1), (1, 1, 2, 2, 1)),
    (1, 96, 32): ((2, 2, 4, 2, 2), (2, 2, 1, 2, 2), (2, 1, 2, 4, 2), (1, 1, 1, 2, 2)),
    (1, 128, 16): ((1, 1, 1, 2, 1), (4, 4, 1, 1, 1), (1, 1, 1, 1, 1), (1, 1, 2, 2, 2)),
    (1, 128, 56): ((4, 4, 2, 1, 1), (4, 4, 2, 1, 1), (1, 1, 2, 2, 2), (1, 1, 2, 2, 2)),
    (2, 112, 64): ((2, 2, 1, 2, 2), (2, 2, 1, 2, 2), (1, 1, 2, 2, 2), (2, 1, 2, 2, 1)),
    (2, 224, 32): ((2, 2, 1, 1, 2), (2, 2, 1, 1, 2), (1, 1, 2, 1, 2), (2, 1, 2, 1, 1)),
}

# Many tokens: microseconds for 128 elements of K and a tile's tokens, where an SM has one 64-row
# tile of a weight, and where it has two; more take time in proportion.
_ONE = {64: 0.19, 96: 0.205, 128: 0.222, 160: 0.26, 192: 0.28, 224: 0.31, 256: 0.335}
_TWO = {64: 0.26, 96: 0.335, 128: 0.405, 160: 0.47, 192: 0.54, 224: 0.61, 256: 0.685}
_ALONE = 1.25  # one warpgroup for both weights of a pair has nothing to overlap decoding with
_START, _TILE_END = 2.4, 1.0  # µs: of a launch, of each tile's end
_PAIR_END, _EXCHANGE = 1.0, 0.008  # more of a pair's end; of each token that warpgroups exchange
_SPLIT = 0.012  # µs for each column that is added up
_WIDE, _TWO_K_TILES = 128, (0.96, 1.06)  # a stage of two, up to so many columns and beyond


@functools.cache
def choose_config(
    problem: Problem, output: EpilogueConfig, sms: int = SMS
) -> tuple[Tile, EpilogueConfig]:
    """Tile and epilogue for a problem, including the way of storing the result.

    Args:
        problem: GEMM problem; must not be empty. K is a multiple of 64.
        output: epilogue, whose ``boxes`` is chosen here.
        sms: number of SMs of the device.
    """
    if problem.m <= MANY_TOKENS:
        return _few_token_config(problem, output, sms)
    found = many_token_configs(problem, output, sms)
    return min(found, key=lambda each: estimate(problem, each[0], sms))


@functools.cache
def choose_batch_invariant(
    problem: Problem, output: EpilogueConfig, sms: int = SMS
) -> tuple[Tile, EpilogueConfig]:
    """Tile and epilogue with which a row's sums are bit-identical for any number of tokens.

    K is never split: the tensor core adds up a row's products in the order of K, whatever the tile.

    Args:
        problem: GEMM problem; must not be empty. K is a multiple of 64.
        output: epilogue, whose ``boxes`` is chosen here.
        sms: number of SMs of the device.
    """
    if problem.m > MANY_TOKENS:
        found = [c for c in many_token_configs(problem, output, sms) if c[0].split_k == 1]
        return min(found, key=lambda each: estimate(problem, each[0], sms))
    plain = Tile(_few(problem.m), problem.weights, warpgroups=1, fp8=True)
    return _first_fitting(problem, [replace(plain, k_tiles=2), plain], output, sms)


def all_configs(
    n: int,
    k: int,
    weights: int,
    output: EpilogueConfig,
    max_tokens: int,
    *,
    sms: int = SMS,
    batch_invariant: bool = False,
) -> list[tuple[Tile, EpilogueConfig]]:
    """Distinct tiles, each with its epilogue, that are chosen for 1 to ``max_tokens`` tokens."""
    choose = choose_batch_invariant if batch_invariant else choose_config
    # A choice depends on the number of tiles that tokens fill, all multiples of 32.
    starts = [1, *(1 + t for t in _FEW_TOKENS), *range(MANY_TOKENS + 33, max_tokens + 1, 32)]
    problems = (Problem(m, n, k, weights) for m in starts if m <= max_tokens)
    return list(dict.fromkeys(choose(problem, output, sms) for problem in problems))


def _few(tokens: int) -> int:
    return next(t for t in _FEW_TOKENS if t >= tokens)


def _few_token_config(
    problem: Problem, output: EpilogueConfig, sms: int
) -> tuple[Tile, EpilogueConfig]:
    """Tile of the nearest problem in the table, adapted to K, and its epilogue."""
    tokens = _few(problem.m)
    rows, across = math.ceil(problem.n / TILE_ROWS), math.ceil(problem.k / TILE_K)
    entry = nearest(_FEW_TOKEN_CUTS, problem.weights, rows, across)
    cut = _Cut(*_FEW_TOKEN_CUTS[entry][_FEW_TOKENS.index(tokens)])
    tile = Tile(tokens, problem.weights, **cut._asdict(), fp8=True)
    while tile.k_tiles > 1 and problem.k % (TILE_K * tile.k_tiles):
        tile = replace(tile, k_tiles=tile.k_tiles // 2)
    while tile.split_k > across // tile.k_tiles:
        tile = replace(tile, split_k=tile.split_k // 2)
    plain = Tile(tokens, problem.weights, warpgroups=1, fp8=True)
    return _first_fitting(problem, [tile, plain], output, sms)


def _first_fitting(
    problem: Problem, tiles: list[Tile], output: EpilogueConfig, sms: int
) -> tuple[Tile, EpilogueConfig]:
    """The first tile that fits, with as many CTAs per SM as it has, at most, and as are needed."""
    found = []
    for tile in tiles:
        most = min(tile.ctas_per_sm, math.ceil(ctas(problem, tile) / sms))
        found += [replace(tile, ctas_per_sm=each) for each in range(max(1, most), 0, -1)]
    fitting = [(t, with_store(output, t, problem.n)) for t in found]
    return next((t, o) for t, o in fitting if fits(problem, t, o))


def many_token_configs(
    problem: Problem, output: EpilogueConfig, sms: int = SMS
) -> list[tuple[Tile, EpilogueConfig]]:
    """Tiles for many tokens that can serve the problem, each with its epilogue."""
    found = []
    for tokens, warpgroups, k_tiles, split in itertools.product(_ONE, (1, 2), (1, 2), (1, 2, 4)):
        if tokens * problem.weights > 256:
            continue
        tile = Tile(
            tokens, problem.weights, warpgroups=warpgroups, k_tiles=k_tiles, split_k=split, fp8=True
        )
        count = ctas(problem, tile)
        if warpgroups == 1 and count > sms * _together(tile):
            continue  # nothing overlaps with a tile's end
        # Clusters lie within a GPC, so that clusters of four do not reach every SM.
        if split == 1 or count <= sms - 16 * (split > 2):
            most = min(math.ceil(count / sms), _together(tile))
            found += [replace(tile, ctas_per_sm=each) for each in range(1, most + 1)]
    if problem.weights == 2:
        apart = (t for t in _ONE if t % 32 == 0 and t >= 96)
        found += [Tile(t, 2, weight_per_warpgroup=True, fp8=True) for t in apart]
    fitting = [(t, with_store(output, t, problem.n)) for t in found]
    return [(t, o) for t, o in fitting if fits(problem, t, o)]


def _together(tile: Tile) -> int:
    """Number of CTAs of which an SM has registers, for accumulators, operands and decoding."""
    if tile.reallocates_registers:
        return 1
    return max(1, min(3, REGISTERS // (tile.threads * (80 + tile.columns // 2))))


def fits(problem: Problem, tile: Tile, output: EpilogueConfig) -> bool:
    """Whether a tile can serve a problem."""
    across = math.ceil(problem.k / TILE_K)
    return (
        (tile.k_tiles == 1 or problem.k % (TILE_K * tile.k_tiles) == 0)
        and tile.split_k <= across // tile.k_tiles
        and tile.depth(output.shared_bytes(tile)) >= tile.least_stages
    )


def estimate(problem: Problem, tile: Tile, sms: int = SMS) -> float:
    """Estimated time of the GEMM with many tokens in microseconds."""
    count = ctas(problem, tile)
    resident = min(tile.ctas_per_sm, math.ceil(count / sms))
    waves = math.ceil(count / (sms * resident))
    operands = tile.operands * resident
    step = _ONE[tile.tokens] if operands == 1 else _TWO[tile.tokens] * operands / 2
    if tile.warpgroups * resident == 1 and tile.weights == 2:
        step *= _ALONE
    if tile.k_tiles == 2:
        step *= _TWO_K_TILES[tile.columns > _WIDE]
    end = _TILE_END + _PAIR_END * (tile.weights == 2) + _EXCHANGE * _exchanged(tile)
    steps = math.ceil(problem.k / TILE_K) / tile.split_k
    return _START + waves * (steps * step + end) + _SPLIT * tile.columns * (tile.split_k > 1)


def _exchanged(tile: Tile) -> int:
    return tile.tokens if tile.weight_per_warpgroup else 0


@functools.cache
def choose_grouped_config(
    problem: GroupedProblem, output: EpilogueConfig, sms: int = SMS
) -> tuple[Tile, EpilogueConfig]:
    """Tile and epilogue of a grouped GEMM; see ``choose_grouped.choose_grouped_config``.

    None of its choices was measured.
    """
    tokens, weights = problem.tile_tokens, problem.weights
    as_one = Problem(problem.used * tokens, problem.n, problem.k, weights)
    if tokens < MANY_TOKENS:
        plain = Tile(tokens, weights, warpgroups=1, ctas_per_sm=3 if weights == 1 else 2, fp8=True)
        tile, output = _first_fitting(as_one, [replace(plain, k_tiles=2), plain], output, sms)
    else:
        fitting = many_token_configs(as_one, output, sms)
        tile, output = min(
            ((t, o) for t, o in fitting if t.tokens == tokens and t.split_k == 1),
            key=lambda each: estimate(as_one, each[0], sms),
        )
    return replace(tile, grouped=True), output
