"""What the warps of a group of queries share while they choose."""

from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Array, Int32, Uint32, Uint64

from nvfp4_kernels.indexer.sm100.best_keys.tile import Selection
from nvfp4_kernels.indexer.sm100.consumer import Place
from nvfp4_kernels.indexer.sm100.scheduler import Range, Ranges
from nvfp4_kernels.indexer.sm100.tile import KEYS, ScoreTile
from nvfp4_kernels.indexer.topk.shared import CELLS, Cta, Shared
from nvfp4_kernels.indexer.topk.tile import BINS, MAX_CLUSTER, MAX_TIES, WARP


@dataclass(frozen=True)
class Output:
    """Global memory for results.

    Attributes:
        scores: float32 [queries, stride] of candidates; null if CTAs see all keys.
        keys: int32 [queries, stride], numbers of the candidates, or of the best.
        counts: int32 [queries] of the candidates, or of the best.
        stride: elements from one query's to the next's.
        top_k: keys to choose.
    """

    scores: cute.Pointer
    keys: cute.Pointer
    counts: cute.Pointer
    stride: Int32
    top_k: Int32


@dataclass(frozen=True)
class Kept:
    """What a thread keeps.

    Attributes:
        team: this thread among those of the group, and their shared memory; ``buffer``, ``cells``
            and ``threshold`` are those of all of the group's queries.
        out: the result.
        ranges: of all queries.
        first: query of the group, among the CTA's.
        seen: of each, if it is scored; otherwise empty.
    """

    team: Cta
    out: Output
    ranges: Ranges
    first: Int32
    seen: list[Range]

    def of(self, number: Int32 | int) -> Cta:
        """The team with the memory of the ``number``-th query."""
        shared, room = self.team.shared, self.team.config.buffer
        mine = replace(
            shared,
            buffer=shared.buffer.subview(number * room),
            cells=shared.cells.subview(number * CELLS),
            threshold=shared.threshold.subview(number),
        )
        return replace(self.team, shared=mine)


def allocate(tile: ScoreTile, selection: Selection) -> Shared:
    """Shared memory of all groups."""

    def words(dtype: type[cutlass.Numeric], count: int) -> Array:
        # The alignment is taken for that of every element that is stored.
        return Array(dtype, count, space=AddressSpace.smem, alignment=dtype.width // 8)

    team, groups = selection.team(tile), tile.groups
    return Shared(
        buffer=words(Uint64, tile.queries * selection.room),
        bitmap=words(Uint32, groups * team.words),
        counts=words(Int32, groups * team.threads),
        histograms=words(Int32, groups * BINS),
        totals=words(Int32, groups * WARP),
        cells=words(Int32, tile.queries * CELLS),
        greater=words(Int32, groups * MAX_CLUSTER),
        ties=words(Uint64, groups * MAX_TIES),
        threshold=words(Uint64, tile.queries),
    )


def team_of(tile: ScoreTile, selection: Selection, memory: Shared, place: Place) -> Cta:
    """This thread in its group, with the group's part of ``memory``."""
    group, team = place.group, selection.team(tile)
    first = group * tile.group_queries
    shared = Shared(
        buffer=memory.buffer.subview(first * selection.room),
        bitmap=memory.bitmap.subview(group * team.words),
        counts=memory.counts.subview(group * team.threads),
        histograms=memory.histograms.subview(group * BINS),
        totals=memory.totals.subview(group * WARP),
        cells=memory.cells.subview(first * CELLS),
        greater=memory.greater.subview(group * MAX_CLUSTER),
        ties=memory.ties.subview(group * MAX_TIES),
        threshold=memory.threshold.subview(first),
    )
    thread = place.turn * KEYS + place.lane
    return Cta(
        config=team,
        shared=shared,
        thread=thread,
        warp=thread // WARP,
        lane=cute.arch.lane_idx(),
        rank=Int32(0),
        barrier=group + 1,  # barrier 0 is all threads'
    )
