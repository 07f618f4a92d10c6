"""How many candidates a query has room for, and which tile and splits go with it. No CuTe here."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from nvfp4_kernels.indexer.sm100.best_keys.tile import (
    KEY_BYTES,
    QUERY_BYTES,
    Selection,
    team_bytes,
)
from nvfp4_kernels.indexer.sm100.choose import (
    DOUBLED,
    MEMORY_BYTES,
    START,
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

WORDS = 1024  # of a bitmap: 32768 keys are put in order at a time
MAX_LAPS = 4
MAX_GROUPS = 2  # a third would leave too few registers to choose with
MAX_SPLITS = 256
MAX_KEYS = 1 << 30  # of a query: their numbers are int32, as is what is computed from them
STAGES = (4, 3, 2)  # of the ring of key tiles, at the least
# Assumed, in cycles, of choosing among candidates of several splits: about a launch.
MERGE = 20000
CACHE_BYTES = 100 << 20  # of a B200's L2, which has 126 MB
# A split sees so many times as many keys as are wanted, so that most of them are no candidates.
SHARE = 2


@dataclass(frozen=True)
class Choice:
    """What ``choose_config`` finds."""

    tile: ScoreTile
    selection: Selection
    splits: int


@functools.lru_cache(maxsize=1024)
def choose_config(problem: ScoreProblem, top_k: int, sms: int) -> Choice | None:
    """The tile, the room and the splits with the least time, of those that fit into shared memory.

    Args:
        problem: to score.
        top_k: keys to choose for each query.
        sms: of the GPU.

    Returns:
        None if not even a single query's candidates fit.
    """
    for room in (top_k + max(top_k // 2, 1024), top_k):
        found = [fitted for tile in _tiles(problem) if (fitted := _fit(tile, top_k, room))]
        if found:
            choices = (
                Choice(tile, replace(selection, whole=splits == 1), splits)
                for tile, selection in found
                for splits in _splits(problem, tile, top_k, sms)
            )
            return min(choices, key=lambda choice: _cycles(problem, choice, sms))
    return None


def _tiles(problem: ScoreProblem) -> Iterator[ScoreTile]:
    """As many queries as there are share a CTA's keys, or fewer; those of most queries come first.

    Of a single group there are two sets, which take key tiles in turn, where registers allow.
    """
    columns = head_columns(problem.heads)
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
        turns = 2 if groups == 1 and narrow else 1
        yield ScoreTile(
            problem.fmt, problem.head_dim, problem.heads, group_queries, groups, turns, doubled
        )


def _fit(tile: ScoreTile, top_k: int, least: int) -> tuple[ScoreTile, Selection] | None:
    """The tile beside candidates of its queries, ``least`` of each and what may arrive."""
    for stages in STAGES:
        left = MAX_SHARED_BYTES - tile.fixed_bytes - stages * tile.stage_bytes
        each = (left - team_bytes(tile, WORDS)) // tile.queries - QUERY_BYTES
        # More would take longer to choose from, and the ring can have it.
        room = min(each // KEY_BYTES, 2 * top_k + 2048) // KEYS * KEYS
        laps = MAX_LAPS
        while laps > 1 and 2 * Selection(room, laps, WORDS, True).arriving(tile) > room - top_k:
            laps //= 2
        selection = Selection(room, laps, WORDS, True)
        if selection.most(tile) >= least:
            return replace(tile, consumer_bytes=selection.shared_bytes(tile)), selection
    return None


def _splits(problem: ScoreProblem, tile: ScoreTile, top_k: int, sms: int) -> set[int]:
    """Worth a look: those that fill the SMs a few times."""
    ctas = problem.sequences * -(-problem.queries // tile.queries)
    most = min(problem.columns // (SHARE * top_k), -(-problem.columns // KEYS), MAX_SPLITS)
    waves = range(1, 5)
    return {1} | {max(1, min(wave * sms // ctas, most)) for wave in waves}


def _cycles(problem: ScoreProblem, choice: Choice, sms: int) -> float:
    """Of waves of CTAs, of which the last may leave SMs idle; bytes come at their own rate.

    CTAs of the same sequence read its keys from L2, unless those of all are more than it holds.
    """
    tile, splits = choice.tile, choice.splits
    blocks = -(-problem.queries // tile.queries)
    ctas = problem.sequences * blocks
    waves = -(-ctas * splits // sms)
    tiles = -(-problem.columns // KEYS)
    computed = waves * -(-tiles // splits) * tile_cycles(tile)
    stored = problem.sequences * tiles * stored_bytes(tile)
    read = stored * (blocks if stored > CACHE_BYTES else 1)
    scored = waves * START + max(computed, read / MEMORY_BYTES)
    return scored + (MERGE if splits > 1 else 0)
