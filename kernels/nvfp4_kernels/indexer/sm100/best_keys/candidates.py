"""State and shared memory of the warps that select the top-k of a group's candidates."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Array, Int32, Uint32, Uint64

from nvfp4_kernels.indexer.sm100.best_keys.tile import Selection
from nvfp4_kernels.indexer.sm100.scheduler import KeyRange, KeyRanges
from nvfp4_kernels.indexer.sm100.tile import KEYS, ScoreTile
from nvfp4_kernels.indexer.sm100.visitor import EpilogueCoord
from nvfp4_kernels.indexer.topk.shared import NUM_COUNTERS, SharedStorage, ThreadGroup
from nvfp4_kernels.indexer.topk.tile import BINS, MAX_CLUSTER, MAX_TIES, WARP


class TopkOutput(NamedTuple):
    """Output of a launch in global memory: top-k keys or, if keys are split, candidates.

    Attributes:
        scores: float32 [queries, stride], scores of candidates; null if keys are not split.
        keys: int32 [queries, stride], indices of candidates or of the top-k keys.
        counts: int32 [queries], number of candidates or of top-k keys.
        stride: elements from one query's row to the next.
        top_k: number of keys to select.
    """

    scores: cute.Pointer
    keys: cute.Pointer
    counts: cute.Pointer
    stride: Int32
    top_k: Int32


@dataclass(frozen=True)
class TopkState:
    """State of an epilogue thread.

    Attributes:
        group: thread group of a group of queries; ``buffer``, ``counters`` and ``threshold`` in its
            shared memory cover all queries of the group.
        out: output of the launch.
        ranges: keys that each query of the launch sees.
        first: index of the group's first query in the CTA.
        seen: keys that each query of the group sees; empty for an unscored query.
    """

    group: ThreadGroup
    out: TopkOutput
    ranges: KeyRanges
    first: Int32
    seen: list[KeyRange]

    def query(self, number: Int32 | int) -> ThreadGroup:
        """Thread group with the shared memory of the group's ``number``-th query."""
        shared, capacity = self.group.shared, self.group.tile.capacity
        memory = replace(
            shared,
            buffer=shared.buffer.subview(number * capacity),
            counters=shared.counters.subview(number * NUM_COUNTERS),
            threshold=shared.threshold.subview(number),
        )
        return replace(self.group, shared=memory)


def allocate(tile: ScoreTile, selection: Selection) -> SharedStorage:
    """Allocate shared memory for the selection by all groups."""

    def words(dtype: type[cutlass.Numeric], count: int) -> Array:
        # CuTe takes the array's alignment for that of every element stored.
        return Array(dtype, count, space=AddressSpace.smem, alignment=dtype.width // 8)

    topk, groups = selection.topk_tile(tile), tile.groups
    return SharedStorage(
        buffer=words(Uint64, tile.queries * selection.capacity),
        bitmap=words(Uint32, groups * topk.words),
        counts=words(Int32, groups * topk.threads),
        histograms=words(Int32, groups * BINS),
        totals=words(Int32, groups * WARP),
        counters=words(Int32, tile.queries * NUM_COUNTERS),
        greater=words(Int32, groups * MAX_CLUSTER),
        ties=words(Uint64, groups * MAX_TIES),
        threshold=words(Uint64, tile.queries),
    )


def thread_group(
    tile: ScoreTile, selection: Selection, memory: SharedStorage, coord: EpilogueCoord
) -> ThreadGroup:
    """Thread group of a group of queries, with the group's part of ``memory``."""
    number, topk = coord.group, selection.topk_tile(tile)
    first = number * tile.group_queries
    shared = SharedStorage(
        buffer=memory.buffer.subview(first * selection.capacity),
        bitmap=memory.bitmap.subview(number * topk.words),
        counts=memory.counts.subview(number * topk.threads),
        histograms=memory.histograms.subview(number * BINS),
        totals=memory.totals.subview(number * WARP),
        counters=memory.counters.subview(first * NUM_COUNTERS),
        greater=memory.greater.subview(number * MAX_CLUSTER),
        ties=memory.ties.subview(number * MAX_TIES),
        threshold=memory.threshold.subview(first),
    )
    thread = coord.pingpong * KEYS + coord.lane
    return ThreadGroup(
        tile=topk,
        shared=shared,
        thread=thread,
        warp=thread // WARP,
        lane=cute.arch.lane_idx(),
        rank=Int32(0),
        barrier=number + 1,  # barrier 0 is that of all threads
    )
