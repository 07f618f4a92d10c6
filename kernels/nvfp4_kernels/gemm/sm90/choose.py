"""Chooser of the GEMM tile: by a table for few tokens, else by an estimate. Pure; imports no CuTe.

Table and estimate were tuned on an H200, on the layers of Llama 8B and of Llama 70B on four GPUs,
in bfloat16: the table by the time of a whole layer, the estimate by the times of single GEMMs. At
80 to 1024 tokens the tile of least estimate is at most 3 % slower than the best of all tiles tried.
To time the chosen tiles, run ``python -m examples.kernel_bench``; to time a layer, ``python -m
examples.kernel_bench.layer``.
"""

import functools
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from nvfp4_kernels.devices import ELEMENT_BITS
from nvfp4_kernels.formats.fragments import TILE
from nvfp4_kernels.gemm.sm90.tile import (
    MAX_STAGES,
    MOST_COLUMNS_IN_TURN,
    EpilogueConfig,
    Tile,
)
from nvfp4_kernels.sm90.limits import REGISTERS, SMS

MANY_TOKENS = 64  # from here on results are stored in boxes
_FEW_TOKENS = (8, 16, 32, MANY_TOKENS)  # of the tiles below


class _Cut(NamedTuple):
    """Fields of a ``Tile`` that the table for few tokens contains."""

    warpgroups: int
    k_tiles: int
    split_k: int
    slices: int = 1
    max_stages: int = MAX_STAGES


# Few tokens: all CTAs are resident at once, so that each SM has loads in flight. By weights, rows
# of 64 and K / 64: the fastest tiles with up to 8, 16, 32 and 64 tokens; the nearest entry counts.
# Measured in a layer (``examples/kernel_bench/layer.py``), where weights are loaded while the
# preceding kernel ends: a ring shorter than memory allows leaves the next kernel room to start.
_FEW_TOKEN_CUTS = {
    (1, 40, 128): (
        _Cut(1, 4, 8),
        _Cut(1, 4, 8, max_stages=3),
        _Cut(1, 4, 8, max_stages=2),
        _Cut(1, 2, 4, max_stages=3),
    ),
    (1, 64, 64): (
        _Cut(4, 4, 2, slices=4, max_stages=8),
        _Cut(2, 8, 2, slices=2, max_stages=4),
        _Cut(2, 4, 2, slices=2, max_stages=4),
        _Cut(1, 2, 2, max_stages=5),
    ),
    (1, 64, 224): (
        _Cut(4, 4, 2, slices=4, max_stages=8),
        _Cut(2, 8, 2, slices=2, max_stages=4),
        _Cut(2, 4, 2, slices=2, max_stages=4),
        _Cut(1, 4, 2, max_stages=3),
    ),
    (1, 96, 64): (
        _Cut(2, 4, 1, slices=2, max_stages=10),
        _Cut(2, 8, 1, slices=2, max_stages=4),
        _Cut(2, 2, 4, max_stages=4),
        _Cut(2, 2, 4, max_stages=4),
    ),
    (1, 128, 32): (
        _Cut(4, 4, 1, slices=4),
        _Cut(4, 4, 1, slices=4),
        _Cut(2, 4, 1, slices=2, max_stages=4),
        _Cut(1, 2, 1, max_stages=6),
    ),
    (1, 128, 112): (
        _Cut(2, 8, 1, slices=2, max_stages=6),
        _Cut(2, 4, 1, slices=2, max_stages=8),
        _Cut(1, 4, 2, max_stages=3),
        _Cut(1, 2, 2, max_stages=4),
    ),
    (2, 112, 128): (
        _Cut(1, 4, 2, max_stages=5),
        _Cut(1, 2, 4),
        _Cut(2, 2, 4),
        _Cut(1, 2, 2, max_stages=3),
    ),
    (2, 224, 64): (
        _Cut(1, 4, 1),
        _Cut(1, 2, 2, max_stages=5),
        _Cut(1, 4, 1, max_stages=2),
        _Cut(2, 2, 1, max_stages=3),
    ),
}

# Many tokens: cycles of a K tile, by accumulators of a warpgroup and columns of each. Fitted, with
# what is below, to times at 80 to 1024 tokens; then 224 raised and 256 lowered by 2 %, for the
# widest is ahead where there are thousands. A pair's 64 continues the line, and was not timed.
_STEP = {
    1: {
        64: 450, 80: 462, 96: 502, 112: 545, 128: 575, 144: 633, 160: 672, 176: 725, 192: 790,
        208: 868, 224: 945, 256: 1025,
    },
    2: {64: 860, 80: 931, 96: 1000, 112: 1070, 128: 1150},
}  # fmt: skip
_CYCLES = 1700  # per µs
_START, _TILE = 2.4, 1.4  # µs: of a launch, of each tile's end
_SPLIT = 0.016  # µs for each column that is added up
_WIDEST = 256  # columns
_TWO_K_TILES = 0.97  # a stage of two, where the ring has room for three
# With batch invariance: the part of the SMs that rows of 64 fill where K stays whole, the least K
# that is cut, and K tiles of a stage for few tokens by weights; as measured, of whole layers.
_FULL, _LEAST_CUT_K = 0.9, 2048
_INVARIANT_K_TILES = {1: 2, 2: 4}
# Large stages, where a CTA has one tile: with longer rings a layer with 128 tokens took 1 % more
# for each of three products.
_ONE_WAVE_STAGES = 4


@dataclass(frozen=True)
class Problem:
    """Size of a GEMM: ``m`` tokens by ``weights`` matrices of ``n`` rows, K = ``k``."""

    m: int
    n: int
    k: int
    weights: int = 1


@functools.cache
def choose_config(
    problem: Problem, output: EpilogueConfig, sms: int = SMS
) -> tuple[Tile, EpilogueConfig]:
    """Tile and epilogue for a problem, including the way of storing the result.

    Args:
        problem: GEMM problem; must not be empty.
        output: epilogue, whose ``boxes`` is chosen here.
        sms: number of SMs of the device.
    """
    if problem.m <= MANY_TOKENS:
        return _few_token_config(problem, output, sms)
    fitting = many_token_configs(problem, output, sms)
    return min(fitting, key=lambda each: estimate(problem, each[0], sms))


@functools.cache
def choose_batch_invariant(
    problem: Problem, output: EpilogueConfig, sms: int = SMS
) -> tuple[Tile, EpilogueConfig]:
    """Tile and epilogue with which a row's sums are bit-identical for any number of tokens.

    Tiles for any number of tokens add up a row's products in the same order if they split K into
    the same parts, as found on an H200 (``tests/test_kernels/test_batch_invariance_gpu.py``). The
    number of parts therefore follows from N, K and the number of SMs, and not from the tokens; the
    rest of the tile follows from the tokens, as usual. Either the CTAs of a cluster sum the parts
    (``split_k``) or, with many tokens, one CTA may sum the parts in turn (``parts_in_turn``).

    Args:
        problem: GEMM problem; must not be empty.
        output: epilogue, whose ``boxes`` is chosen here.
        sms: number of SMs of the device.
    """
    parts = invariant_parts(problem, sms)
    if problem.m <= MANY_TOKENS:
        return _few_token_invariant(problem, parts, output, sms)
    usual = [
        (tile, with_store(output, tile, problem.n))
        for tile, _ in many_token_configs(problem, output, sms)
    ]
    fitting = [each for each in usual if each[0].split_k == parts]
    if parts > 1:
        fitting += [
            (replace(tile, parts_in_turn=parts), out)
            for tile, out in usual
            if tile.split_k == 1 and tile.columns <= MOST_COLUMNS_IN_TURN
        ]
    fitting = [each for each in fitting if _same_parts(problem, each[0], parts)]
    return min(fitting, key=lambda each: estimate(problem, each[0], sms))


def invariant_parts(problem: Problem, sms: int = SMS) -> int:
    """Number of parts of K, for any number of tokens: 2 if SMs would idle and K is long, else 1."""
    full = math.ceil(problem.n / TILE) > _FULL * sms
    return 1 if full or problem.k < _LEAST_CUT_K else 2


def _few_token_invariant(
    problem: Problem, parts: int, output: EpilogueConfig, sms: int
) -> tuple[Tile, EpilogueConfig]:
    """Tile and epilogue for up to 64 tokens: one warpgroup, K split into ``parts``."""
    tokens = next(t for t in _FEW_TOKENS if t >= problem.m)
    plain = Tile(tokens, problem.weights, warpgroups=1, split_k=parts)
    tiles = [
        replace(plain, k_tiles=k_tiles, ctas_per_sm=together)
        for together in range(_together(problem, plain, sms), 0, -1)
        for k_tiles in (_INVARIANT_K_TILES[problem.weights], 2, 1)
    ]
    tiles = [tile for tile in tiles if _same_parts(problem, tile, parts)]
    fitting = [(t, with_store(output, t, problem.n)) for t in tiles]
    return next((t, o) for t, o in fitting if fits(problem, t, o))


def _same_parts(problem: Problem, tile: Tile, parts: int) -> bool:
    """Whether every part of K is a whole number of stages, so that ``k_tiles`` changes no part."""
    return tile.k_tiles == 1 or math.ceil(problem.k / TILE) % (tile.k_tiles * parts) == 0


def representative_tokens(most: int) -> list[int]:
    """Numbers of tokens from 1 to ``most`` that cover every distinct choice.

    A choice depends on the number of tiles that the tokens fill, and so changes only after a
    multiple of the tile sizes' common divisor.
    """
    grain = math.gcd(*itertools.chain(*_STEP.values()))
    starts = [1, *(1 + t for t in _FEW_TOKENS), *range(MANY_TOKENS + 1 + grain, most + 1, grain)]
    return [m for m in starts if m <= most]


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
    problems = (Problem(m, n, k, weights) for m in representative_tokens(max_tokens))
    return list(dict.fromkeys(choose(problem, output, sms) for problem in problems))


def _few_token_config(
    problem: Problem, output: EpilogueConfig, sms: int
) -> tuple[Tile, EpilogueConfig]:
    """Tile of the nearest problem in the table, adapted to K, and its epilogue.

    An SM has as many CTAs as ``_together`` allows and as fit.
    """
    tokens = next(t for t in _FEW_TOKENS if t >= problem.m)
    rows, across = (math.ceil(size / TILE) for size in (problem.n, problem.k))
    entry = nearest(_FEW_TOKEN_CUTS, problem.weights, rows, across)
    cut = _FEW_TOKEN_CUTS[entry][_FEW_TOKENS.index(tokens)]
    tile = Tile(tokens, problem.weights, **cut._asdict())
    while tile.k_tiles > 1 and problem.k % (TILE * tile.k_tiles):
        deeper = min(MAX_STAGES, 2 * tile.max_stages)  # the same number of bytes in flight
        tile = replace(tile, k_tiles=tile.k_tiles // 2, max_stages=deeper)
    while tile.split_k > across // tile.k_tiles:
        tile = replace(tile, split_k=tile.split_k // 2)
    tiles = [
        replace(tile, ctas_per_sm=each) for each in range(_together(problem, tile, sms), 0, -1)
    ]
    fitting = [(t, with_store(output, t, problem.n)) for t in tiles]
    return next((t, o) for t, o in fitting if fits(problem, t, o))


def nearest(
    entries: Iterable[tuple[int, int, int]], weights: int, rows: int, across: int
) -> tuple[int, int, int]:
    """Entry of the same number of weights whose numbers of row and K tiles are nearest."""

    def distance(entry: tuple[int, int, int]) -> float:
        apart = abs(math.log(rows / entry[1])) + abs(math.log(across / entry[2]))
        return apart + 100 * (weights != entry[0])

    return min(entries, key=distance)


def _together(problem: Problem, tile: Tile, sms: int) -> int:
    """Number of CTAs per SM: enough for the whole grid, as far as registers allow."""
    # Registers for accumulators and decoding: with more CTAs these would spill.
    room = REGISTERS // (tile.threads * (68 + tile.columns // 2))
    return min(math.ceil(ctas(problem, tile) / sms), room)


def many_token_configs(
    problem: Problem, output: EpilogueConfig, sms: int = SMS
) -> list[tuple[Tile, EpilogueConfig]]:
    """Tiles for many tokens that can serve the problem, each with its epilogue."""
    weights = problem.weights
    tiles = [Tile(tokens, weights) for tokens in _STEP[weights]]
    # One warpgroup per accumulator of a pair: both have room up to 128 tokens only.
    tiles += [
        Tile(tokens, 2, weight_per_warpgroup=True) for tokens in range(96, 257, 32) if weights == 2
    ]
    tiles += [replace(t, k_tiles=2) for t in tiles if t.accumulators == 1 and t.columns <= 128]
    # Clusters lie within a GPC, so that clusters of four do not reach every SM. Split, the
    # widest tile took up to 1.7 times as long as others on an H200.
    parts = [
        replace(t, split_k=split)
        for t in tiles
        if t.columns < _WIDEST and not t.weight_per_warpgroup
        for split in (2, 4)
    ]
    tiles += [t for t in parts if ctas(problem, t) <= sms - 16 * (t.split_k > 2)]
    tiles = [
        replace(t, max_stages=_ONE_WAVE_STAGES)
        if ctas(problem, t) <= sms and t.k_tiles * t.accumulators == 2
        else t
        for t in tiles
    ]
    fitting = [(t, with_store(output, t, problem.n)) for t in tiles]
    return [(t, o) for t, o in fitting if fits(problem, t, o)]


def estimate(problem: Problem, tile: Tile, sms: int = SMS) -> float:
    """Estimated time of the GEMM in microseconds."""
    waves = math.ceil(ctas(problem, tile) / sms)
    steps = math.ceil(problem.k / TILE) / tile.split_k
    step = _STEP[tile.accumulators][tile.tokens] / _CYCLES
    if tile.k_tiles == 2:
        step *= _TWO_K_TILES
    return _START + waves * (steps * step + _TILE) + _SPLIT * tile.columns * (tile.split_k > 1)


def ctas(problem: Problem, tile: Tile) -> int:
    """Number of CTAs of the whole GEMM."""
    return math.ceil(problem.n / tile.rows) * math.ceil(problem.m / tile.tokens) * tile.split_k


def with_store(output: EpilogueConfig, tile: Tile, n: int) -> EpilogueConfig:
    """Copy of ``output`` that stores by TMA boxes if possible and tiles have at least 64 tokens."""
    aligned = n * ELEMENT_BITS[output.dtype] % 128 == 0 and output.dtype != "float32"
    whole = aligned or output.is_fp8  # rows of E4M3 are padded
    return replace(output, boxes=whole and tile.parts == 1 and tile.tokens >= MANY_TOKENS)


def fits(problem: Problem, tile: Tile, output: EpilogueConfig) -> bool:
    """Whether a tile can serve a problem."""
    across = math.ceil(problem.k / TILE)
    return (
        (tile.k_tiles == 1 or problem.k % (TILE * tile.k_tiles) == 0)
        and tile.split_k <= across // tile.k_tiles
        and tile.depth(output.shared_bytes(tile)) >= 2
    )
