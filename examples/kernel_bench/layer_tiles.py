"""Candidate tiles of a product on a Hopper GPU: their list, compilation, and use in launches."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from nvfp4_kernels.gemm.sm90 import choose, choose_fp8
from nvfp4_kernels.gemm.sm90.choose import MANY_TOKENS, Problem, ctas, with_store
from nvfp4_kernels.gemm.sm90.tile import MAX_STAGES, SLICED_TOKENS, EpilogueConfig, Tile
from nvfp4_kernels.runtime.compile import build, object_path
from nvfp4_kernels.sm90.limits import SMS

Choice = tuple[Tile, EpilogueConfig]


def tiles_of(problem: Problem, output: EpilogueConfig) -> list[Choice]:
    """Candidate tiles for a product, each with its epilogue.

    With many tokens these are the tiles that the chooser compares; with few, variants of the chosen
    tile that serve the problem with at least ``SMS // 3`` CTAs.

    Args:
        problem: GEMM problem.
        output: epilogue, whose ``boxes`` follows from the tile.
    """
    chooser: Any = choose_fp8 if output.act == "float8_e4m3fn" else choose
    if problem.m > MANY_TOKENS:
        configs: list[Choice] = chooser.many_token_configs(problem, output)
        return configs
    usual, _ = chooser.choose_config(problem, output)
    usual = replace(usual, max_stages=MAX_STAGES, ctas_per_sm=1)
    teams = [(1, 1), (2, 1), *([(2, 2), (4, 4)] if usual.tokens <= SLICED_TOKENS else [])]
    found = []
    for (warpgroups, slices), k_tiles, split in itertools.product(
        teams, (1, 2, 4, 8), (1, 2, 4, 8)
    ):
        tile = replace(usual, warpgroups=warpgroups, slices=slices, k_tiles=k_tiles, split_k=split)
        count = ctas(problem, tile)
        together = range(1, 1 + min(4, -(-count // SMS))) if count >= SMS // 3 else ()
        tiles = [replace(tile, ctas_per_sm=each) for each in together]
        choices = [(one, with_store(output, one, problem.n)) for one in tiles]
        found += [(one, out) for one, out in choices if chooser.fits(problem, one, out)]
    return found


def compile_tile(choice: Choice) -> None:
    """Compile one candidate, in a worker process, unless the object file exists."""
    from nvfp4_kernels.gemm.sm90.kernel import WeightOnlyGemm

    kernel = WeightOnlyGemm(*choice)
    place = object_path(kernel)
    if place is not None and not place.exists():
        build(kernel, place)


@contextmanager
def chosen(problem: Problem, choice: Choice) -> Iterator[None]:
    """Context in which GEMMs of ``problem``, with the operands of ``choice``, use its tile."""
    from nvfp4_kernels.gemm.sm90 import launch

    tile, _ = choice
    owner: Any = choose_fp8 if tile.fp8 else launch  # module whose name the launch looks up
    before = owner.choose_config

    def choose_tile(of: Problem, output: EpilogueConfig, sms: int) -> Choice:
        if of == problem:
            return tile, with_store(output, tile, of.n)
        usual: Choice = before(of, output, sms)
        return usual

    owner.choose_config = choose_tile
    try:
        yield
    finally:
        owner.choose_config = before


def said(choice: Choice) -> str:
    """Description of a tile, for the output."""
    tile, _ = choice
    parts = f"{tile.k_tiles} K tiles, {tile.split_k} parts of K, {tile.slices} slices"
    apart = ", a weight for each" if tile.weight_per_warpgroup else ""
    return (
        f"{tile.tokens} tokens, {tile.warpgroups} warpgroups{apart}, {parts}, "
        f"{tile.ctas_per_sm} CTAs of an SM"
    )
