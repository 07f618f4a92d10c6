"""Chooser of a grouped product's tile, and of how many tokens a layer's tiles have. Pure, no CuTe.

What a product costs is ``choose.estimate`` of as many matrices as tiles of tokens are in use.
"""

import functools
from dataclasses import dataclass, replace

from nvfp4_kernels.gemm.sm100.choose import (
    GATE_UP,
    REGULAR,
    SWAP_AB,
    Problem,
    estimate,
    fits,
    with_store,
)
from nvfp4_kernels.gemm.sm100.tile import EpilogueConfig, Tile
from nvfp4_kernels.sm100.limits import CTA_ROWS, SMS
from nvfp4_kernels.terms import TermLayout


@dataclass(frozen=True)
class GroupedProblem:
    """Up to ``tiles`` tiles of tokens, by the weights of ``experts``.

    Attributes:
        tile_tokens: rows of a tile.
        n, k: rows and elements of each weight.
        tiles: that there is memory for.
        experts: of this rank.
        weights: of each expert.
        terms: that each token is the sum of.
    """

    tile_tokens: int
    n: int
    k: int
    tiles: int
    experts: int
    weights: int = 1
    terms: int = 1


@functools.cache
def choose_grouped(
    problem: GroupedProblem, output: EpilogueConfig, sms: int = SMS
) -> tuple[Tile, EpilogueConfig]:
    """The candidate with the least estimated time, of equals the first."""
    product = Problem(
        problem.tile_tokens, problem.n, problem.k, problem.tiles, problem.weights, problem.terms
    )
    fitting = grouped_candidates(problem, output)
    return min(fitting, key=lambda each: estimate(product, each[0], sms))


def grouped_candidates(
    problem: GroupedProblem, output: EpilogueConfig
) -> list[tuple[Tile, EpilogueConfig]]:
    """Tiles whose tokens' side a tile of tokens fills, each with the way its result leaves."""
    tokens, weights = problem.tile_tokens, problem.weights
    tiles = [tile for tile in SWAP_AB if tile.columns == min(tokens, CTA_ROWS)]
    if tokens >= CTA_ROWS:
        tiles += [tile for tile in (GATE_UP if weights == 2 else REGULAR) if tile.rows <= tokens]
    terms = TermLayout.of(problem.terms, tokens)
    one = Problem(tokens, problem.n, problem.k, 1, weights, problem.terms)
    tiles = [
        replace(tile, weights=weights, terms=terms, grouped=True)
        for tile in tiles
        if tile.cluster_m == tile.ctas and (tile.cluster_n == 1 or not tile.swap_ab)
    ]
    stored = [(tile, with_store(output, tile, problem.n)) for tile in tiles]
    return [(tile, out) for tile, out in stored if fits(one, tile, out)]
