"""Which tile, and how many splits of the keys, for a scoring problem. Pure, and no CuTe."""

import functools
from dataclasses import dataclass

from nvfp4_kernels.indexer.sm100.tile import (
    GROUP_COLUMNS,
    KEYS,
    MAX_GROUPS,
    Format,
    ScoreTile,
    head_columns,
)
from nvfp4_kernels.sm100.limits import SMS

DOUBLED = 5  # of 8 pairs: the ALU and the FMA units are then about as busy
MAX_SPLITS = 256
MOST_TRIED = 8
# As the discrete-event model of the tests gives them (``python -m tests.modelled_indexer``); none
# was measured on a B200. Cycles of one SM: of starting and ending a CTA, and of a key tile, at the
# least, and per column of it. Columns of an MMA per cycle. Bytes from memory per cycle, for the
# chip, and at the most for an SM.
START = 5000
TILE, COLUMN, MMA_COLUMNS = 250, 2.6, 2
MEMORY_BYTES, SM_BYTES = 3900, 40


@dataclass(frozen=True)
class ScoreProblem:
    """Host integers that a launch knows.

    Attributes:
        fmt: of queries and keys.
        head_dim, heads: of a query.
        sequences: whose queries see keys of their own.
        queries: of each.
        columns: keys of each, at the most.
    """

    fmt: Format
    head_dim: int
    heads: int
    sequences: int
    queries: int
    columns: int


@functools.lru_cache(maxsize=4096)
def choose_config(problem: ScoreProblem, sms: int = SMS) -> tuple[ScoreTile, int]:
    """The tile, and the splits of the keys that keep the device busy.

    As many queries share a CTA's keys as there are, up to three groups. A single group is put in
    twice where registers allow: the two take key tiles in turn.
    """
    columns = head_columns(problem.heads)
    fit = max(1, GROUP_COLUMNS // columns)
    group_queries = min(fit, problem.queries)
    groups = min(MAX_GROUPS, _ceil_div(problem.queries, group_queries))
    if group_queries * columns > GROUP_COLUMNS:
        groups = 1
    turns = 2 if groups == 1 and group_queries * columns <= GROUP_COLUMNS else 1
    doubled = 0 if problem.fmt == "bf16" else DOUBLED  # bfloat16 products may be infinite
    tile = ScoreTile(
        problem.fmt, problem.head_dim, problem.heads, group_queries, groups, turns, doubled
    )
    candidates = _splits(problem, tile, sms)
    return tile, min(candidates, key=lambda splits: estimate(problem, tile, splits, sms))


def _splits(problem: ScoreProblem, tile: ScoreTile, sms: int) -> list[int]:
    """Few, and those that fill a few waves."""
    ctas = _ctas(problem, tile)
    most = max(1, min(_ceil_div(problem.columns, KEYS), MAX_SPLITS))
    waves = range(1, MOST_TRIED + 1)
    filling = {wave * sms // ctas for wave in waves} if ctas else set()
    return sorted({min(max(1, splits), most) for splits in {*waves, *filling}})


def _ctas(problem: ScoreProblem, tile: ScoreTile) -> int:
    """Of one split."""
    return problem.sequences * _ceil_div(problem.queries, tile.queries)


def estimate(problem: ScoreProblem, tile: ScoreTile, splits: int, sms: int = SMS) -> float:
    """Cycles, of waves of CTAs that each have a start and a share of the tiles.

    Waves that the last CTAs leave half empty cost as much as full ones. Only what has to come from
    memory, or go there, does so at the same rate whichever SMs ask for it.
    """
    tiles = _ceil_div(problem.columns, KEYS)
    moved = problem.sequences * tiles * stored_bytes(tile)
    moved += 4 * problem.sequences * problem.queries * problem.columns
    waves = _ceil_div(_ctas(problem, tile) * splits, sms)
    computed = waves * _ceil_div(tiles, splits) * tile_cycles(tile)
    return waves * START + max(computed, moved / MEMORY_BYTES)


def stored_bytes(tile: ScoreTile) -> int:
    """Of a key tile."""
    return tile.key_bytes + KEYS * tile.scale_bytes


def tile_cycles(tile: ScoreTile) -> float:
    """Of one SM, of a key tile."""
    computed = tile.columns * max(COLUMN, tile.steps / MMA_COLUMNS)
    return max(TILE, computed, stored_bytes(tile) / SM_BYTES)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
