"""The consumer of scores that keeps the best of each query."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint64
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.indexer.sm100.best_keys.candidates import Kept, Output, allocate, team_of
from nvfp4_kernels.indexer.sm100.best_keys.result import write
from nvfp4_kernels.indexer.sm100.best_keys.tile import Selection
from nvfp4_kernels.indexer.sm100.consumer import Place
from nvfp4_kernels.indexer.sm100.scheduler import Range, Ranges, Work, range_of
from nvfp4_kernels.indexer.sm100.tile import ScoreTile
from nvfp4_kernels.indexer.sm100.variant import Variant
from nvfp4_kernels.indexer.topk.keep import keep_best
from nvfp4_kernels.indexer.topk.keys import LEAST, MOST, key_of, known
from nvfp4_kernels.indexer.topk.select import select_in_cta
from nvfp4_kernels.indexer.topk.shared import CELLS, OFFERED, Cta, Shared, add, lanes_before, vote


@dataclass(frozen=True)
class BestKeys:
    """Chooses among the scores as they come; see ``sm100/indexer/consumer.py``.

    A query's candidates are those that exceed its threshold, a candidate that ``top_k`` others of
    the same query are not less than. No two have the same key, of value and column: what is chosen
    depends neither on the order in which warps append nor on when thresholds rise.
    """

    tile: ScoreTile
    variant: Variant
    selection: Selection

    def least(self, out: Output) -> Int32:
        """Who sees no more than are wanted need not be scored."""
        return out.top_k + 1

    def memory(self) -> Shared:
        return allocate(self.tile, self.selection)

    @cute.jit
    def open(self, out: Output, memory: Shared, ranges: Ranges, work: Work, place: Place) -> Kept:
        """Clears what the group shares."""
        count = self.tile.group_queries
        first = place.group * count
        seen = [self._seen(out, ranges, work, first + number) for number in range(count)]
        team = team_of(self.tile, self.selection, memory, place)
        if team.thread < count:
            team.shared.threshold.store(Uint64(LEAST - 1), team.thread)
            team.shared.cells.store(Int32(0), team.thread * CELLS + OFFERED)
        team.meet()
        return Kept(team, out, ranges, first, seen)

    def _seen(self, out: Output, ranges: Ranges, work: Work, number: Int32) -> Range:
        """Of a query of the CTA; nothing for one that is not scored, or that there is not."""
        query = work.first_query + cutlass.min(number, work.queries - 1)
        seen = range_of(self.variant, ranges, query, work.columns)
        scored = (number < work.queries) & (seen.end - seen.begin > out.top_k)
        return Range(seen.begin, Int32(cutlass.select_(scored, seen.end, seen.begin)))

    def put(self, kept: Kept, number: int, key: Int32, score: Float32) -> None:
        """Of a key of a tile that some query of the CTA sees, this one or another."""
        self._offer(kept.of(number), kept.seen[number], key, score)

    @cute.jit
    def _offer(self, cta: Cta, seen: Range, key: Int32, score: Float32) -> None:
        shared = cta.shared
        candidate = key_of(known(score), key - seen.begin)
        # What a key that is not seen scores may be anything.
        better = (key >= seen.begin) & (key < seen.end) & (candidate > shared.threshold[0])
        hits = vote(better)
        if hits != 0:
            at = Int32(0)
            if cta.lane == 0:
                at = add(shared.cells, OFFERED, cute.arch.popc(hits))
            at = cute.arch.shuffle_sync(at, 0) + lanes_before(cta, hits)
            if better:
                shared.buffer.store(candidate, at)

    @cute.jit
    def meet(self, kept: Kept, work: Work, lap: Int32) -> None:
        """Every few laps: room for what comes."""
        tile, team = self.tile, kept.team
        most = self.selection.most(tile)
        if (lap > 0) & (lap % self.selection.laps == 0):
            full = Boolean(False)
            # Whoever appended last knows that the buffer is full.
            if team.lane == 0:
                for number in cutlass.range_constexpr(tile.group_queries):
                    full = full | (add(kept.of(number).shared.cells, OFFERED, 0) > most)
            threads = team.config.threads
            if ptx.barrier_cta_red(full, team.barrier, "or", thread_count=threads):
                self._make_room(kept)

    @cute.jit
    def _make_room(self, kept: Kept) -> None:
        """Reduces buffers of too many candidates; they were written before the last barrier."""
        most = self.selection.most(self.tile)
        for number in cutlass.range(self.tile.group_queries, unroll=1):
            cta = kept.of(number)
            entries = cta.shared.cells[OFFERED]
            if entries > most:
                keep_best(cta, entries, cta.shared.threshold[0], kept.out.top_k)
        kept.team.meet()  # nobody appends before all have seen how many there were

    @cute.jit
    def close(self, kept: Kept, work: Work) -> None:
        """Writes the result."""
        kept.team.meet()
        for number in cutlass.range(self.tile.group_queries, unroll=1):
            cta = kept.of(number)
            entries = cta.shared.cells[OFFERED]
            if entries > kept.out.top_k:
                low = cta.shared.threshold[0]
                select_in_cta(cta, entries, low, Uint64(MOST), kept.out.top_k)
            if kept.first + number < work.queries:
                query = work.first_query + kept.first + number
                seen = range_of(self.variant, kept.ranges, query, work.columns)
                write(cta, kept.out, work, query, seen, self.selection.whole)
