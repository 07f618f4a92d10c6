"""Which tile a product gets. Pure, and no CuTe."""

import functools
import math
from dataclasses import dataclass, replace

from nvfp4_kernels.fragments import TILE
from nvfp4_kernels.sm90.tile import ELEMENT_BITS, FEW_TOKENS, MAX_STAGES, Output, Tile

SMS = 132
MANY_TOKENS = 64  # from here on results leave in boxes


@dataclass(frozen=True)
class Problem:
    """``m`` tokens by ``weights`` matrices of ``n`` rows, all of ``k`` elements."""

    m: int
    n: int
    k: int
    weights: int = 1


def candidates(problem: Problem, output: Output, sms: int = SMS) -> list[tuple[Tile, Output]]:
    """Tiles that can serve the problem, each with the way its result leaves."""
    tiles = _streaming(problem, sms) if problem.m <= MANY_TOKENS else []
    if problem.m >= MANY_TOKENS:
        tiles += _multiplying(problem, sms)
    fitting = [(t, with_store(output, t, problem.n)) for t in tiles]
    return [(t, o) for t, o in fitting if fits(problem, t, o)]


def _streaming(problem: Problem, sms: int) -> list[Tile]:
    """For few tokens: all CTAs at once, so that every SM has loads under way."""
    tokens = next(t for t in (8, 16, 32, 64) if t >= problem.m)
    tiles = []
    for warpgroups in (1, 2):
        for split in (1, 2, 4, 8):
            tile = Tile(tokens, problem.weights, warpgroups=warpgroups, split_k=split)
            each = math.ceil(ctas(problem, tile) / sms)
            if each > 8 // warpgroups:
                continue
            for k_tiles in (1, 2, 4) if tokens <= FEW_TOKENS else (1, 2):
                one = replace(tile, k_tiles=k_tiles, ctas_per_sm=each)
                tiles += [one, replace(one, ahead=8)]
                if tokens <= FEW_TOKENS:
                    # Room for the next kernel's CTAs, to fetch their weights meanwhile.
                    beside = replace(one, ctas_per_sm=2 * each)
                    tiles += [beside, replace(beside, ahead=8)]
    return tiles


def _multiplying(problem: Problem, sms: int) -> list[Tile]:
    """For many tokens."""
    tiles = []
    for tokens in (64, 96, 128, 192, 256):
        for row_tiles in (1, 2):
            if row_tiles * problem.weights * tokens > 256 or tokens >= 2 * problem.m:
                continue
            one = Tile(tokens, problem.weights, row_tiles=row_tiles)
            tiles += [one, replace(one, sharers=2)]
            if problem.m <= 512:
                tiles += [replace(one, k_tiles=2), replace(one, k_tiles=2, split_k=2)]
                tiles += [replace(one, split_k=2), replace(one, split_k=4)]
                if row_tiles * problem.weights * tokens <= 128:
                    tiles += [replace(one, warpgroups=3), replace(one, ctas_per_sm=2)]
    return [t for t in tiles if t.split_k == 1 or ctas(problem, t) <= 2 * sms]


def ctas(problem: Problem, tile: Tile) -> int:
    """CTAs of the whole product."""
    rows = math.ceil(math.ceil(problem.n / tile.rows) / tile.sharers) * tile.sharers
    return rows * math.ceil(problem.m / tile.tokens) * tile.split_k


def with_store(output: Output, tile: Tile, n: int) -> Output:
    """``output``, leaving in boxes where it can."""
    whole = n * ELEMENT_BITS[output.dtype] % 128 == 0 and output.dtype != "float32"
    return replace(output, boxes=whole and tile.split_k == 1 and tile.tokens >= MANY_TOKENS)


def fits(problem: Problem, tile: Tile, output: Output) -> bool:
    """Whether a tile can serve a problem at all."""
    across = math.ceil(problem.k / TILE)
    return (
        across % tile.k_tiles == 0
        and tile.split_k <= across // tile.k_tiles
        and tile.depth(output.shared_bytes(tile)) >= 2
    )


@functools.cache
def choose_config(problem: Problem, output: Output, sms: int = SMS) -> tuple[Tile, Output]:
    """The tile, and the output with the way its result leaves."""
    return candidates(problem, output, sms)[0]
