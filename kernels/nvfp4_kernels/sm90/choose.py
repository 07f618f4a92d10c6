"""Which tile a product gets: few tokens by a table, many by an estimate. Pure, and no CuTe.

Both were measured on an H200, on the layers of Llama 8B and of Llama 70B on four GPUs, in bfloat16,
at 1 to 4096 tokens: what is chosen is at most 5 % behind the fastest of all tiles tried there, but
for what the table has from within a layer. ``python -m examples.kernel_bench`` times it.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from nvfp4_kernels.fragments import TILE
from nvfp4_kernels.sm90.tile import ELEMENT_BITS, MAX_STAGES, REGISTERS, Output, Tile

SMS = 132
MANY_TOKENS = 64  # from here on results leave in boxes
_FEW_TOKENS = (8, 16, 32, MANY_TOKENS)  # of the tiles below


class _Cut(NamedTuple):
    """Fields of a ``Tile``."""

    warpgroups: int
    k_tiles: int
    split_k: int
    slices: int = 1
    max_stages: int = MAX_STAGES


# Few tokens: every CTA is there at once, so that each SM has loads under way. By weights, rows of
# 64 and K / 64, what was fastest with up to 8, 16, 32 and 64 tokens; the nearest one counts. Up to
# 16 they were so in a layer (``tests/bench_layer.py``; Llama 70B's pair alone only), where weights
# come while the kernel before ends; a short ring leaves room beside attention's.
_STREAMING = {
    (1, 40, 128): (_Cut(2, 8, 4, slices=2), _Cut(2, 4, 4, slices=2), _Cut(1, 2, 8), _Cut(1, 2, 4)),
    (1, 64, 64): (_Cut(2, 8, 2, slices=2), _Cut(2, 4, 2, slices=2), _Cut(1, 2, 2), _Cut(1, 1, 2)),
    (1, 64, 224): (_Cut(4, 4, 2, slices=4), _Cut(1, 4, 8), _Cut(1, 2, 2), _Cut(1, 2, 2)),
    (1, 96, 64): (
        _Cut(2, 4, 2, max_stages=5),
        _Cut(2, 4, 2, slices=2, max_stages=4),
        _Cut(1, 2, 2),
        _Cut(1, 2, 2),
    ),
    (1, 128, 32): (_Cut(4, 4, 1, slices=4), _Cut(4, 4, 1, slices=4), _Cut(1, 2, 2), _Cut(1, 1, 1)),
    (1, 128, 112): (_Cut(2, 8, 2, slices=2), _Cut(2, 4, 2, slices=2), _Cut(1, 2, 2), _Cut(1, 2, 2)),
    (2, 112, 128): (_Cut(1, 2, 4), _Cut(1, 2, 4), _Cut(1, 1, 4), _Cut(1, 1, 2)),
    (2, 224, 64): (_Cut(1, 2, 2), _Cut(1, 4, 1), _Cut(1, 1, 2), _Cut(1, 1, 1)),
}

# Many tokens: cycles of a K tile, by an accumulator's columns and how many a warpgroup has. Those
# of 160 and 224 lie 1.5 % above the line between their neighbours', until they are measured.
_STEP = {
    (64, 1): 461, (96, 1): 538, (128, 1): 604, (160, 1): 708, (192, 1): 791, (224, 1): 929,
    (256, 1): 1039, (64, 2): 900, (96, 2): 1000, (128, 2): 1150,
}  # fmt: skip
_CYCLES = 1700  # per µs
_START, _TILE, _SPLIT = 2.0, 0.9, 2.4  # µs: of a launch, of each tile's end, of adding up parts
_TWO_K_TILES = 0.94  # a stage of two, where the ring has room for three


@dataclass(frozen=True)
class Problem:
    """``m`` tokens by ``weights`` matrices of ``n`` rows, all of ``k`` elements."""

    m: int
    n: int
    k: int
    weights: int = 1


@functools.cache
def choose_config(problem: Problem, output: Output, sms: int = SMS) -> tuple[Tile, Output]:
    """The tile, and the output with the way its result leaves.

    Args:
        problem: at least one element each way.
        output: its ``boxes`` is chosen here.
        sms: of the device.
    """
    if problem.m <= MANY_TOKENS:
        return _streaming(problem, output, sms)
    fitting = multiplying(problem, output, sms)
    return min(fitting, key=lambda each: estimate(problem, each[0], sms))


def telling_tokens(most: int) -> list[int]:
    """Numbers of tokens from 1 to ``most``, such that every other one is served like one of them.

    What is chosen depends on how many tiles the tokens fill, and so changes only behind a multiple
    of what all sizes of tiles are multiples of.
    """
    grain = math.gcd(*(tokens for tokens, _ in _STEP))
    starts = [1, *(1 + t for t in _FEW_TOKENS), *range(MANY_TOKENS + 1 + grain, most + 1, grain)]
    return [m for m in starts if m <= most]


def every_config(
    n: int, k: int, weights: int, output: Output, max_tokens: int, sms: int = SMS
) -> list[tuple[Tile, Output]]:
    """What ``choose_config`` gives 1 to ``max_tokens`` tokens, each once."""
    problems = (Problem(m, n, k, weights) for m in telling_tokens(max_tokens))
    return list(dict.fromkeys(choose_config(problem, output, sms) for problem in problems))


def _streaming(problem: Problem, output: Output, sms: int) -> tuple[Tile, Output]:
    """As the nearest problem of the table, with as many CTAs of an SM as fit."""
    tokens = next(t for t in _FEW_TOKENS if t >= problem.m)
    rows, across = (math.ceil(size / TILE) for size in (problem.n, problem.k))

    def distance(entry: tuple[int, int, int]) -> float:
        weights, entry_rows, entry_across = entry
        apart = abs(math.log(rows / entry_rows)) + abs(math.log(across / entry_across))
        return apart + 100 * (weights != problem.weights)

    cut = _STREAMING[min(_STREAMING, key=distance)][_FEW_TOKENS.index(tokens)]
    tile = Tile(tokens, problem.weights, **cut._asdict())
    while tile.k_tiles > 1 and problem.k % (TILE * tile.k_tiles):
        tile = replace(tile, k_tiles=tile.k_tiles // 2)
    while tile.split_k > across // tile.k_tiles:
        tile = replace(tile, split_k=tile.split_k // 2)
    # Accumulators, and what decoding takes: with more CTAs these would not stay in registers.
    room = REGISTERS // (tile.threads * (68 + tile.columns // 2))
    together = min(math.ceil(ctas(problem, tile) / sms), room)
    tiles = [replace(tile, ctas_per_sm=each) for each in range(together, 0, -1)]
    fitting = [(t, with_store(output, t, problem.n)) for t in tiles]
    return next((t, o) for t, o in fitting if fits(problem, t, o))


def multiplying(problem: Problem, output: Output, sms: int = SMS) -> list[tuple[Tile, Output]]:
    """Tiles for many tokens that can serve the problem, each with the way its result leaves."""
    tiles = []
    for tokens, accumulators in _STEP:
        # Both accumulators of a pair have room in a warpgroup up to 128 tokens.
        apart = problem.weights == 2 and tokens > 128
        if accumulators % problem.weights and not apart:
            continue
        row_tiles = math.ceil(accumulators / problem.weights)
        one = Tile(tokens, problem.weights, row_tiles=row_tiles, apart=apart)
        tiles.append(one)
        if one.columns <= 128:
            tiles += [replace(one, k_tiles=2)]
    # What is added up takes the ring's room, so that only what needs few CTAs is split.
    parts = [replace(t, split_k=s) for t in tiles if t.tokens <= 128 for s in (2, 4)]
    tiles += [t for t in parts if t.columns * t.split_k <= 512]
    # Clusters lie within a GPC, so that those of four do not reach every SM.
    tiles = [t for t in tiles if t.split_k == 1 or ctas(problem, t) <= sms - 16 * (t.split_k > 2)]
    fitting = [(t, with_store(output, t, problem.n)) for t in tiles]
    return [(t, o) for t, o in fitting if fits(problem, t, o)]


def estimate(problem: Problem, tile: Tile, sms: int = SMS) -> float:
    """Microseconds that the product takes, roughly."""
    waves = math.ceil(ctas(problem, tile) / sms)
    steps = math.ceil(problem.k / TILE) / tile.split_k
    step = _STEP[tile.tokens, tile.accumulators] / _CYCLES
    if tile.k_tiles == 2:
        step *= _TWO_K_TILES
    return _START + waves * (steps * step + _TILE) + _SPLIT * (tile.split_k > 1)


def ctas(problem: Problem, tile: Tile) -> int:
    """CTAs of the whole product."""
    return math.ceil(problem.n / tile.rows) * math.ceil(problem.m / tile.tokens) * tile.split_k


def with_store(output: Output, tile: Tile, n: int) -> Output:
    """``output``, leaving in boxes where it can."""
    whole = n * ELEMENT_BITS[output.dtype] % 128 == 0 and output.dtype != "float32"
    return replace(output, boxes=whole and tile.parts == 1 and tile.tokens >= MANY_TOKENS)


def fits(problem: Problem, tile: Tile, output: Output) -> bool:
    """Whether a tile can serve a problem at all."""
    across = math.ceil(problem.k / TILE)
    return (
        (tile.k_tiles == 1 or problem.k % (TILE * tile.k_tiles) == 0)
        and tile.split_k <= across // tile.k_tiles
        and tile.depth(output.shared_bytes(tile)) >= 2
    )
