"""Chooser of the tile of grouped products, and of the tokens that a layer's tiles hold. Pure."""

import functools
from dataclasses import dataclass

from nvfp4_kernels.gemm.sm90.choose import MANY_TOKENS, with_store
from nvfp4_kernels.gemm.sm90.tile import EpilogueConfig, Tile
from nvfp4_kernels.sm90.limits import SMS


@dataclass(frozen=True)
class GroupedProblem:
    """``tiles`` of ``tile_tokens`` tokens at the most, each times the weights of an expert.

    Attributes:
        experts: whose weights there are.
        n, k: of each of them.
        weights: of an expert: 1, or 2 for gate and up.
    """

    tiles: int
    tile_tokens: int
    experts: int
    n: int
    k: int
    weights: int = 1


@functools.cache
def choose_grouped_config(
    problem: GroupedProblem, output: EpilogueConfig, sms: int = SMS
) -> tuple[Tile, EpilogueConfig]:
    """Tile, and epilogue with the way its result is stored."""
    tokens, weights = problem.tile_tokens, problem.weights
    if tokens < MANY_TOKENS:
        tile = Tile(tokens, weights, warpgroups=1, ctas_per_sm=3, grouped=True)
    else:
        tile = Tile(tokens, weights, weight_per_warpgroup=weights * tokens > 256, grouped=True)
    return tile, with_store(output, tile, problem.n)
