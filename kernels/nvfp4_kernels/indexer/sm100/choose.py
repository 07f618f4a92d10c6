"""Choice of a tile, and of the number of splits of the keys, for scoring. Imports no CuTe."""

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

DOUBLED = 5  # of 8 pairs of heads: ALU and FMA units are then about equally busy
MAX_SPLITS = 256
MAX_WAVES = 8
# Estimates of the discrete-event model of the tests (``python -m tests.modelled.indexer``), not
# measured on a B200: cycles of one SM to start and end a CTA, for a key tile at least, and for each
# column of one; columns of an MMA per cycle; bytes per cycle from memory, of the chip and of an SM.
CTA_CYCLES = 5000
MIN_TILE_CYCLES, COLUMN_CYCLES, MMA_COLUMNS_PER_CYCLE = 250, 2.6, 2
DRAM_BYTES_PER_CYCLE, SM_BYTES_PER_CYCLE = 3900, 40


@dataclass(frozen=True)
class ScoreProblem:
    """Scoring problem as the host knows it at launch.

    Attributes:
        fmt: format of queries and keys.
        head_dim, num_heads: sizes of a query.
        sequences: number of sequences; a query sees keys of its own sequence.
        queries: number of queries per sequence.
        keys: maximum number of keys per sequence.
    """

    fmt: Format
    head_dim: int
    num_heads: int
    sequences: int
    queries: int
    keys: int


@functools.lru_cache(maxsize=4096)
def choose_config(problem: ScoreProblem, sms: int = SMS) -> tuple[ScoreTile, int]:
    """Tile, and the number of splits of the keys with the least estimated time.

    Up to three groups of queries share a CTA's keys. If there is a single group, two ping-pong sets
    of epilogue warps take key tiles alternately, where registers allow.
    """
    columns = head_columns(problem.num_heads)
    fit = max(1, GROUP_COLUMNS // columns)
    group_queries = min(fit, problem.queries)
    groups = min(MAX_GROUPS, _ceil_div(problem.queries, group_queries))
    if group_queries * columns > GROUP_COLUMNS:
        groups = 1
    pingpong = 2 if groups == 1 and group_queries * columns <= GROUP_COLUMNS else 1
    doubled = 0 if problem.fmt == "bf16" else DOUBLED  # bfloat16 products may be infinite
    tile = ScoreTile(
        problem.fmt, problem.head_dim, problem.num_heads, group_queries, groups, pingpong, doubled
    )
    candidates = _splits(problem, tile, sms)
    return tile, min(candidates, key=lambda splits: estimate(problem, tile, splits, sms))


def _splits(problem: ScoreProblem, tile: ScoreTile, sms: int) -> list[int]:
    """Candidate numbers of splits: 1 to ``MAX_WAVES``, and enough for 1 to ``MAX_WAVES`` waves."""
    ctas = _ctas(problem, tile)
    max_splits = max(1, min(_ceil_div(problem.keys, KEYS), MAX_SPLITS))
    waves = range(1, MAX_WAVES + 1)
    filling = {wave * sms // ctas for wave in waves} if ctas else set()
    return sorted({min(max(1, splits), max_splits) for splits in {*waves, *filling}})


def _ctas(problem: ScoreProblem, tile: ScoreTile) -> int:
    """Number of CTAs per split."""
    return problem.sequences * _ceil_div(problem.queries, tile.queries)


def estimate(problem: ScoreProblem, tile: ScoreTile, splits: int, sms: int = SMS) -> float:
    """Estimated cycles of a launch: waves of CTAs, each with a start-up time and key tiles.

    A half-empty last wave costs as much as a full wave. The time of memory traffic, a lower bound
    on that of key tiles, does not depend on the number of SMs.
    """
    tiles = _ceil_div(problem.keys, KEYS)
    moved = problem.sequences * tiles * stored_bytes(tile)
    moved += 4 * problem.sequences * problem.queries * problem.keys
    waves = _ceil_div(_ctas(problem, tile) * splits, sms)
    computed = waves * _ceil_div(tiles, splits) * tile_cycles(tile)
    return waves * CTA_CYCLES + max(computed, moved / DRAM_BYTES_PER_CYCLE)


def stored_bytes(tile: ScoreTile) -> int:
    """Bytes of a key tile and its scales in global memory."""
    return tile.key_bytes + KEYS * tile.scale_bytes


def tile_cycles(tile: ScoreTile) -> float:
    """Cycles that one SM takes for a key tile."""
    computed = tile.columns * max(COLUMN_CYCLES, tile.steps / MMA_COLUMNS_PER_CYCLE)
    return max(MIN_TILE_CYCLES, computed, stored_bytes(tile) / SM_BYTES_PER_CYCLE)


def _ceil_div(a: int, b: int) -> int:
    """Quotient, rounded up."""
    return -(-a // b)
