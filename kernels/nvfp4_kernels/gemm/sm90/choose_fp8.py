"""Chooser of the GEMM tile for E4M3 tokens and folded weights. Pure functions; imports no CuTe."""

import functools
import itertools
import math
from dataclasses import replace

from nvfp4_kernels.formats.folded import TILE_K
from nvfp4_kernels.gemm.sm90.choose import Problem, ctas, with_store
from nvfp4_kernels.gemm.sm90.choose_grouped import GroupedProblem
from nvfp4_kernels.gemm.sm90.tile import EpilogueConfig, Tile
from nvfp4_kernels.sm90.limits import REGISTERS, SMS

_TOKENS = (8, 16, 32, 64, 96, 128, 160, 192, 224, 256)  # of tiles
# Estimate: cycles of an SM for 128 elements of K, 64 rows of a weight and a tile of tokens: a fixed
# part of decoding, and a part for each token; cycles of a launch, and of a tile's end.
_DECODE, _TOKEN = 160, 0.5
_START, _TILE_END = 3000, 1500
_SPLIT = 30  # cycles for each token that is added up
_LATENCY = 700  # cycles until a stage's first bytes arrive


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
    return min(configs(problem, output, sms), key=lambda each: estimate(problem, each[0], sms))


@functools.cache
def choose_batch_invariant(
    problem: Problem, output: EpilogueConfig, sms: int = SMS
) -> tuple[Tile, EpilogueConfig]:
    """Tile and epilogue with which a row's sums are bit-identical for any number of tokens.

    K is not split: the sums of a row then run in one order, whatever the tile.

    Args:
        problem: GEMM problem; must not be empty. K is a multiple of 64.
        output: epilogue, whose ``boxes`` is chosen here.
        sms: number of SMs of the device.
    """
    whole = [each for each in configs(problem, output, sms) if each[0].parts == 1]
    return min(whole, key=lambda each: estimate(problem, each[0], sms))


def configs(
    problem: Problem, output: EpilogueConfig, sms: int = SMS
) -> list[tuple[Tile, EpilogueConfig]]:
    """Tiles that can serve the problem, each with its epilogue."""
    least = next((t for t in _TOKENS if t >= problem.m), _TOKENS[-1])
    found = []
    for tokens, warpgroups, k_tiles, split in itertools.product(
        [t for t in _TOKENS if t <= least], (1, 2), (1, 2), (1, 2, 4, 8)
    ):
        if problem.weights * tokens > 256 or (least <= 64 and tokens < least):
            continue
        tile = Tile(
            tokens, problem.weights, warpgroups=warpgroups, k_tiles=k_tiles, split_k=split, fp8=True
        )
        if split > 1 and ctas(problem, tile) > sms * together(tile):
            continue
        found.append(replace(tile, ctas_per_sm=min(together(tile), _needed(problem, tile, sms))))
    if problem.weights == 2:
        found += [
            Tile(t, 2, weight_per_warpgroup=True, fp8=True)
            for t in _TOKENS
            if t % 32 == 0 and 96 <= t <= least
        ]
    fitting = [(t, with_store(output, t, problem.n)) for t in found]
    return [(t, o) for t, o in fitting if fits(problem, t, o)]


def together(tile: Tile) -> int:
    """Number of CTAs of which an SM has registers."""
    if tile.reallocates_registers:
        return 1
    return max(1, min(4, REGISTERS // (tile.threads * (80 + tile.columns // 2))))


def _needed(problem: Problem, tile: Tile, sms: int) -> int:
    return max(1, math.ceil(ctas(problem, tile) / sms))


def fits(problem: Problem, tile: Tile, output: EpilogueConfig) -> bool:
    """Whether a tile can serve a problem."""
    across = math.ceil(problem.k / TILE_K)
    return (
        (tile.k_tiles == 1 or problem.k % (TILE_K * tile.k_tiles) == 0)
        and tile.split_k <= across // tile.k_tiles
        and tile.depth(output.shared_bytes(tile)) >= tile.least_stages
    )


def estimate(problem: Problem, tile: Tile, sms: int = SMS) -> float:
    """Estimated cycles of the GEMM."""
    steps = math.ceil(problem.k / TILE_K) / tile.split_k
    waves = math.ceil(ctas(problem, tile) / (sms * tile.ctas_per_sm))
    rows = tile.operands * tile.ctas_per_sm  # of 64, which share an SM
    step = rows * max(_DECODE, tile.tokens * _TOKEN * 128) / 2
    latency = _LATENCY / max(1, tile.depth(0) * tile.k_tiles)
    parts = _SPLIT * tile.columns * (tile.split_k > 1)
    return _START + waves * (steps * max(step, latency) + _TILE_END) + parts


@functools.cache
def choose_grouped_config(
    problem: GroupedProblem, output: EpilogueConfig, sms: int = SMS
) -> tuple[Tile, EpilogueConfig]:
    """Tile and epilogue of a grouped GEMM; see ``choose_grouped.choose_grouped_config``."""
    tokens = problem.tile_tokens
    as_one = Problem(problem.used * tokens, problem.n, problem.k, problem.weights)
    found = []
    for warpgroups, k_tiles in itertools.product((1, 2), (1, 2)):
        tile = Tile(tokens, problem.weights, warpgroups=warpgroups, k_tiles=k_tiles, fp8=True)
        found.append(replace(tile, ctas_per_sm=together(tile)))
    if problem.weights == 2 and tokens > 128:
        found = [Tile(tokens, 2, weight_per_warpgroup=True, fp8=True)]
    fitting = [(t, with_store(output, t, problem.n)) for t in found if t.columns <= 256]
    fitting = [(t, o) for t, o in fitting if fits(as_one, t, o)]
    tile, output = min(fitting, key=lambda each: estimate(as_one, each[0], sms))
    return replace(tile, grouped=True), output
