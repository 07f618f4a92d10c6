"""Choice of candidate buffers, tile and number of splits. Imports no CuTe."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from nvfp4_kernels.indexer.sm100.best_keys.tile import (
    KEY_BYTES,
    QUERY_BYTES,
    Selection,
    group_bytes,
)
from nvfp4_kernels.indexer.sm100.choose import (
    CTA_CYCLES,
    DOUBLED,
    DRAM_BYTES_PER_CYCLE,
    ScoreProblem,
    stored_bytes,
    tile_cycles,
)
from nvfp4_kernels.indexer.sm100.tile import (
    GROUP_COLUMNS,
    KEYS,
    ScoreTile,
    head_columns,
)
from nvfp4_kernels.sm100.limits import MAX_SHARED_BYTES

BITMAP_WORDS = 1024  # of a bitmap: it orders 32768 keys at a time
MAX_SYNC_PHASES = 4
MAX_GROUPS = 2  # a third would leave too few registers for the selection
MAX_SPLITS = 256
MAX_KEYS = 1 << 30  # of a query: their numbers, and sums of two, are int32
STAGE_COUNTS = (4, 3, 2)  # of the ring of key tiles, at least; the first that fits
# Assumed cycles of choosing among the candidates of several splits: about a launch.
MERGE_CYCLES = 20000
L2_BYTES = 100 << 20  # of a B200's L2, which has 126 MB
# Keys of a split, at least, in units of top_k, so that most of them are no candidates.
MIN_SPLIT_RATIO = 2


@dataclass(frozen=True)
class Choice:
    """Choice of a tile, candidate buffers, and the number of splits of the keys."""

    tile: ScoreTile
    selection: Selection
    splits: int


@functools.lru_cache(maxsize=1024)
def choose_config(problem: ScoreProblem, top_k: int, sms: int) -> Choice | None:
    """Choice with the least estimated time among tiles whose buffers fit in shared memory.

    Only tiles with room for ``top_k + max(top_k // 2, 1024)`` candidates are considered,
    if there are any.

    Args:
        problem: problem sizes.
        top_k: number of keys to select for each query.
        sms: number of SMs of the GPU.

    Returns:
        The choice; None if not even a single query's candidates fit.
    """
    for capacity in (top_k + max(top_k // 2, 1024), top_k):
        found = [fitted for tile in _tiles(problem) if (fitted := _fit(tile, top_k, capacity))]
        if found:
            choices = (
                Choice(tile, replace(selection, whole=splits == 1), splits)
                for tile, selection in found
                for splits in _splits(problem, tile, top_k, sms)
            )
            return min(choices, key=lambda choice: _cycles(problem, choice, sms))
    return None


def _tiles(problem: ScoreProblem) -> Iterator[ScoreTile]:
    """Tiles in descending order of the number of queries that share a CTA's keys.

    If there is a single group, two ping-pong sets of epilogue warps take key tiles alternately,
    where registers allow.
    """
    columns = head_columns(problem.num_heads)
    fit = min(max(1, GROUP_COLUMNS // columns), problem.queries)
    doubled = DOUBLED if problem.fmt in ("nvfp4", "mxfp4") else 0
    narrow = columns <= GROUP_COLUMNS
    shapes = [
        (group_queries, groups)
        for group_queries in range(1, fit + 1)
        for groups in range(1, (MAX_GROUPS if narrow else 1) + 1)
        if group_queries * (groups - 1) < problem.queries
    ]
    for group_queries, groups in sorted(shapes, key=lambda s: (s[0] * s[1], s[1]), reverse=True):
        pingpong = 2 if groups == 1 and narrow else 1
        yield ScoreTile(
            problem.fmt,
            problem.head_dim,
            problem.num_heads,
            group_queries,
            groups,
            pingpong,
            doubled,
        )


def _fit(tile: ScoreTile, top_k: int, min_entries: int) -> tuple[ScoreTile, Selection] | None:
    """Tile and selection with candidate buffers that fit in shared memory; None if none fit.

    Buffers have room for ``min_entries`` candidates per query, and for candidates to append.
    """
    for stages in STAGE_COUNTS:
        left = MAX_SHARED_BYTES - tile.fixed_bytes - stages * tile.stage_bytes
        each = (left - group_bytes(tile, BITMAP_WORDS)) // tile.queries - QUERY_BYTES
        # A larger buffer would take longer to select from, and the ring can have the memory.
        capacity = min(each // KEY_BYTES, 2 * top_k + 2048) // KEYS * KEYS
        sync_phases = MAX_SYNC_PHASES
        while (
            sync_phases > 1
            and 2 * Selection(capacity, sync_phases, BITMAP_WORDS, True).max_appended(tile)
            > capacity - top_k
        ):
            sync_phases //= 2
        selection = Selection(capacity, sync_phases, BITMAP_WORDS, True)
        if selection.max_entries(tile) >= min_entries:
            return replace(tile, visitor_bytes=selection.shared_bytes(tile)), selection
    return None


def _splits(problem: ScoreProblem, tile: ScoreTile, top_k: int, sms: int) -> set[int]:
    """Candidate numbers of splits: 1, and numbers that fill 1 to 4 waves, where keys suffice."""
    ctas = problem.sequences * -(-problem.queries // tile.queries)
    max_splits = min(
        problem.keys // (MIN_SPLIT_RATIO * top_k), -(-problem.keys // KEYS), MAX_SPLITS
    )
    waves = range(1, 5)
    return {1} | {max(1, min(wave * sms // ctas, max_splits)) for wave in waves}


def _cycles(problem: ScoreProblem, choice: Choice, sms: int) -> float:
    """Estimated cycles of waves of CTAs, and of the selection among splits' candidates.

    The last wave may leave SMs idle. CTAs of the same sequence read keys from L2, unless the keys
    of all sequences exceed the L2.
    """
    tile, splits = choice.tile, choice.splits
    blocks = -(-problem.queries // tile.queries)
    ctas = problem.sequences * blocks
    waves = -(-ctas * splits // sms)
    tiles = -(-problem.keys // KEYS)
    computed = waves * -(-tiles // splits) * tile_cycles(tile)
    stored = problem.sequences * tiles * stored_bytes(tile)
    read = stored * (blocks if stored > L2_BYTES else 1)
    scored = waves * CTA_CYCLES + max(computed, read / DRAM_BYTES_PER_CYCLE)
    return scored + (MERGE_CYCLES if splits > 1 else 0)
