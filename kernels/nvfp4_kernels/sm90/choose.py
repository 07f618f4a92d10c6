"""Which tile a product gets. Pure, and no CuTe."""

import functools
import math
from dataclasses import dataclass, replace

from nvfp4_kernels.fragments import TILE
from nvfp4_kernels.sm90.tile import ELEMENT_BITS, Output, Tile

SMS = 132


@dataclass(frozen=True)
class Problem:
    """``m`` tokens by ``weights`` matrices of ``n`` rows, all of ``k`` elements."""

    m: int
    n: int
    k: int
    weights: int = 1


def with_store(output: Output, tile: Tile, n: int) -> Output:
    """``output``, leaving in boxes where it can."""
    whole = n * ELEMENT_BITS[output.dtype] % 128 == 0 and output.dtype != "float32"
    return replace(output, boxes=whole and tile.split_k == 1 and tile.tokens >= 64)


def fits(problem: Problem, tile: Tile, output: Output) -> bool:
    """Whether a tile can serve a problem at all."""
    across = math.ceil(problem.k / TILE)
    return (
        across % tile.k_tiles == 0
        and tile.split_k <= across // tile.k_tiles
        and tile.weights == problem.weights
        and tile.depth(output.shared_bytes(tile)) >= 2
    )


@functools.cache
def choose_config(problem: Problem, output: Output, sms: int = SMS) -> tuple[Tile, Output]:
    """The tile, and the output with the way its result leaves."""
    tokens = next((t for t in (8, 16, 32, 64, 128) if t >= problem.m), 256)
    if tokens == 256 and problem.weights == 2:
        tokens = 128
    tile = Tile(tokens, problem.weights)
    return tile, with_store(output, tile, problem.n)
