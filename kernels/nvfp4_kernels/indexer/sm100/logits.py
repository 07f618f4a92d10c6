"""Visitor that stores scores as rows of logits in global memory."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Float32, Int32, Int64

from nvfp4_kernels.indexer.sm100.scheduler import KeyRange, KeyRanges, TileScheduler, key_range
from nvfp4_kernels.indexer.sm100.tile import KEYS, ScoreTile
from nvfp4_kernels.indexer.sm100.variant import Variant
from nvfp4_kernels.indexer.sm100.visitor import EpilogueCoord

NEGATIVE_INFINITY = float("-inf")


@dataclass(frozen=True)
class LogitRow:
    """Row of a query's logits in global memory.

    Attributes:
        start: address of the row.
        columns: number of columns of the row; 0 for an absent query.
        seen: keys that the query sees.
    """

    start: Int64
    columns: Int32
    seen: KeyRange


@dataclass(frozen=True)
class LogitsVisitor:
    """Visitor that stores float32 [queries, keys]; adjacent lanes store adjacent keys."""

    tile: ScoreTile
    variant: Variant

    def min_keys(self, out: cute.Pointer) -> Int32:
        """Fewest visible keys for which a query is scored: 1."""
        return Int32(1)

    def allocate(self) -> None:
        """Allocate nothing."""
        return None

    def begin(
        self,
        out: cute.Pointer,
        storage: None,
        ranges: KeyRanges,
        scheduler: TileScheduler,
        coord: EpilogueCoord,
    ) -> list[LogitRow]:
        """Rows of the group's queries; also stores −∞ for the CTA's masked key tiles."""
        count = self.tile.group_queries
        first = coord.group * count
        rows = [self._row(out, ranges, scheduler, first + number) for number in range(count)]
        self._store_masked(rows, scheduler, coord.pingpong, coord.lane)
        return rows

    def _row(
        self, out: cute.Pointer, ranges: KeyRanges, scheduler: TileScheduler, number: Int32
    ) -> LogitRow:
        """Row of the ``number``-th query of the CTA."""
        live = number < scheduler.num_queries
        query = scheduler.first_query + cutlass.min(number, scheduler.num_queries - 1)
        return LogitRow(
            start=Int64(out.toint()) + Int64(query) * scheduler.num_keys * 4,
            columns=Int32(cutlass.select_(live, scheduler.num_keys, Int32(0))),
            seen=key_range(self.variant, ranges, query, scheduler.num_keys),
        )

    @cute.jit
    def _store_masked(
        self, rows: list[LogitRow], scheduler: TileScheduler, pingpong: Int32, lane: Int32
    ) -> None:
        """Store −∞ for the masked tiles of a ping-pong set; ``lane``: index of a key in a tile."""
        sets = self.tile.pingpong
        for step in cutlass.range(cute.ceil_div(scheduler.num_masked - pingpong, sets), unroll=1):
            key = scheduler.masked_tile(step * sets + pingpong) * KEYS + lane
            for row in rows:
                self._store(row, key, Float32(NEGATIVE_INFINITY))

    def begin_phase(self, state: list[LogitRow], scheduler: TileScheduler, phase: Int32) -> None:
        """Do nothing: warps share no state."""

    def visit(self, state: list[LogitRow], number: int, key: Int32, score: Float32) -> None:
        """Store the score, or −∞ for a key that only other queries of the CTA see."""
        row = state[number]
        # Selected, not multiplied: a masked key's score may be NaN.
        seen = key < row.seen.end
        if not self.variant.paged:
            seen = seen & (key >= row.seen.begin)
        score = Float32(cutlass.select_(seen, score, Float32(NEGATIVE_INFINITY)))
        self._store(row, key, score)

    def end(self, state: list[LogitRow], scheduler: TileScheduler) -> None:
        """Do nothing: all logits are stored."""

    @cute.jit
    def _store(self, row: LogitRow, key: Int32, score: Float32) -> None:
        """Store one logit, unless ``key`` is beyond the row."""
        if key < row.columns:
            address = row.start + Int64(key) * 4
            pointer = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4)
            Array(pointer, shape=(1,)).store(score, 0)
