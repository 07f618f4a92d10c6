"""Visitor of scores that keeps the top-k keys of each query."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint64
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.indexer.sm100.best_keys.candidates import (
    TopkOutput,
    TopkState,
    allocate,
    thread_group,
)
from nvfp4_kernels.indexer.sm100.best_keys.result import write
from nvfp4_kernels.indexer.sm100.best_keys.tile import Selection
from nvfp4_kernels.indexer.sm100.scheduler import KeyRange, KeyRanges, TileScheduler, key_range
from nvfp4_kernels.indexer.sm100.tile import ScoreTile
from nvfp4_kernels.indexer.sm100.variant import Variant
from nvfp4_kernels.indexer.sm100.visitor import EpilogueCoord
from nvfp4_kernels.indexer.topk.keep import keep_best
from nvfp4_kernels.indexer.topk.keys import MAX_KEY, MIN_KEY, key_of, nan_to_lowest
from nvfp4_kernels.indexer.topk.select import select_in_group
from nvfp4_kernels.indexer.topk.shared import (
    APPENDED,
    NUM_COUNTERS,
    SharedStorage,
    ThreadGroup,
    ballot,
    count_lanes_before,
    fetch_add,
)


@dataclass(frozen=True)
class TopkVisitor:
    """Fused top-k of scores; implements ``ScoreVisitor``.

    A query's candidates are the scores above the query's threshold, which rises only to a value
    that ``top_k`` candidates reach. Sort keys, made of score and column, are distinct, so that the
    selection depends neither on the order in which warps append nor on when thresholds rise.
    """

    tile: ScoreTile
    variant: Variant
    selection: Selection

    def min_keys(self, out: TopkOutput) -> Int32:
        """Fewest visible keys for which a query is scored: ``top_k + 1``; fewer need no scores."""
        return out.top_k + 1

    def allocate(self) -> SharedStorage:
        """Allocate shared memory for the selection by all groups."""
        return allocate(self.tile, self.selection)

    @cute.jit
    def begin(
        self,
        out: TopkOutput,
        storage: SharedStorage,
        ranges: KeyRanges,
        scheduler: TileScheduler,
        coord: EpilogueCoord,
    ) -> TopkState:
        """State of this thread; also resets the group's thresholds and counters."""
        count = self.tile.group_queries
        first = coord.group * count
        seen = [self._seen(out, ranges, scheduler, first + number) for number in range(count)]
        group = thread_group(self.tile, self.selection, storage, coord)
        if group.thread < count:
            group.shared.threshold.store(Uint64(MIN_KEY - 1), group.thread)
            group.shared.counters.store(Int32(0), group.thread * NUM_COUNTERS + APPENDED)
        group.sync()
        return TopkState(group, out, ranges, first, seen)

    def _seen(
        self, out: TopkOutput, ranges: KeyRanges, scheduler: TileScheduler, number: Int32
    ) -> KeyRange:
        """Range of keys that the CTA's ``number``-th query sees; empty if unscored or absent."""
        query = scheduler.first_query + cutlass.min(number, scheduler.num_queries - 1)
        seen = key_range(self.variant, ranges, query, scheduler.num_keys)
        scored = (number < scheduler.num_queries) & (seen.end - seen.begin > out.top_k)
        return KeyRange(seen.begin, Int32(cutlass.select_(scored, seen.end, seen.begin)))

    def visit(self, state: TopkState, number: int, key: Int32, score: Float32) -> None:
        """Append the score if it is a candidate of the group's ``number``-th query."""
        self._append(state.query(number), state.seen[number], key, score)

    @cute.jit
    def _append(self, group: ThreadGroup, seen: KeyRange, key: Int32, score: Float32) -> None:
        """Append a key if the query sees the key and the sort key exceeds the query's threshold."""
        shared = group.shared
        candidate = key_of(nan_to_lowest(score), key - seen.begin)
        # The score of a key that is not seen may be anything.
        better = (key >= seen.begin) & (key < seen.end) & (candidate > shared.threshold[0])
        hits = ballot(better)
        if hits != 0:
            at = Int32(0)
            if group.lane == 0:
                at = fetch_add(shared.counters, APPENDED, cute.arch.popc(hits))
            at = cute.arch.shuffle_sync(at, 0) + count_lanes_before(group, hits)
            if better:
                shared.buffer.store(candidate, at)

    @cute.jit
    def begin_phase(self, state: TopkState, scheduler: TileScheduler, phase: Int32) -> None:
        """Make room, every ``sync_phases`` phases, for the candidates of the next phases."""
        tile, group = self.tile, state.group
        max_entries = self.selection.max_entries(tile)
        if (phase > 0) & (phase % self.selection.sync_phases == 0):
            full = Boolean(False)
            # The lane that appended last sees that the buffer is full, even if others do not.
            if group.lane == 0:
                for number in cutlass.range_constexpr(tile.group_queries):
                    full = full | (
                        fetch_add(state.query(number).shared.counters, APPENDED, 0) > max_entries
                    )
            threads = group.tile.threads
            if ptx.barrier_cta_red(full, group.barrier, "or", thread_count=threads):
                self._make_room(state)

    @cute.jit
    def _make_room(self, state: TopkState) -> None:
        """Reduce each full buffer to the top-k; buffers were written before the last barrier."""
        max_entries = self.selection.max_entries(self.tile)
        for number in cutlass.range(self.tile.group_queries, unroll=1):
            group = state.query(number)
            entries = group.shared.counters[APPENDED]
            if entries > max_entries:
                keep_best(group, entries, group.shared.threshold[0], state.out.top_k)
        state.group.sync()  # counts are read before anyone appends

    @cute.jit
    def end(self, state: TopkState, scheduler: TileScheduler) -> None:
        """Select the top-k keys of each query, and write them."""
        state.group.sync()
        for number in cutlass.range(self.tile.group_queries, unroll=1):
            group = state.query(number)
            entries = group.shared.counters[APPENDED]
            if entries > state.out.top_k:
                low = group.shared.threshold[0]
                select_in_group(group, entries, low, Uint64(MAX_KEY), state.out.top_k)
            if state.first + number < scheduler.num_queries:
                query = scheduler.first_query + state.first + number
                seen = key_range(self.variant, state.ranges, query, scheduler.num_keys)
                write(group, state.out, scheduler, query, seen, self.selection.whole)
