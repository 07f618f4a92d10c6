"""Where scores go: rows of logits in global memory."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Float32, Int32, Int64

from nvfp4_kernels.indexer.sm100.consumer import Place
from nvfp4_kernels.indexer.sm100.scheduler import Range, Ranges, Work, range_of
from nvfp4_kernels.indexer.sm100.tile import KEYS, ScoreTile
from nvfp4_kernels.indexer.sm100.variant import Variant

NEGATIVE_INFINITY = float("-inf")


@dataclass(frozen=True)
class Row:
    """What a thread keeps of a query.

    Attributes:
        start: address of its logits.
        columns: of the result; 0 for a query that there is not.
        seen: keys that it sees.
    """

    start: Int64
    columns: Int32
    seen: Range


@dataclass(frozen=True)
class LogitRows:
    """Stores float32 [queries, columns]; neighbouring lanes have neighbouring keys."""

    tile: ScoreTile
    variant: Variant

    def least(self, out: cute.Pointer) -> Int32:
        return Int32(1)

    def memory(self) -> None:
        return None

    def open(
        self, out: cute.Pointer, memory: None, ranges: Ranges, work: Work, place: Place
    ) -> list[Row]:
        """Also stores −∞ for the hidden key tiles."""
        count = self.tile.group_queries
        first = place.group * count
        rows = [self._row(out, ranges, work, first + number) for number in range(count)]
        self._hide(rows, work, place.turn, place.lane)
        return rows

    def _row(self, out: cute.Pointer, ranges: Ranges, work: Work, number: Int32) -> Row:
        live = number < work.queries
        query = work.first_query + cutlass.min(number, work.queries - 1)
        return Row(
            start=Int64(out.toint()) + Int64(query) * work.columns * 4,
            columns=Int32(cutlass.select_(live, work.columns, Int32(0))),
            seen=range_of(self.variant, ranges, query, work.columns),
        )

    @cute.jit
    def _hide(self, rows: list[Row], work: Work, turn: Int32, lane: Int32) -> None:
        """``lane``: this thread's of a key tile."""
        turns = self.tile.turns
        for step in cutlass.range(cute.ceil_div(work.hidden - turn, turns), unroll=1):
            key = work.hidden_tile(step * turns + turn) * KEYS + lane
            for row in rows:
                self._store(row, key, Float32(NEGATIVE_INFINITY))

    def meet(self, kept: list[Row], work: Work, lap: Int32) -> None:
        """Nothing is shared."""

    def put(self, kept: list[Row], number: int, key: Int32, score: Float32) -> None:
        """Of a key of a tile that some query of the CTA sees, this one or another."""
        row = kept[number]
        # Selected, not multiplied: what a key that is not seen scores may be NaN.
        seen = key < row.seen.end
        if not self.variant.paged:
            seen = seen & (key >= row.seen.begin)
        score = Float32(cutlass.select_(seen, score, Float32(NEGATIVE_INFINITY)))
        self._store(row, key, score)

    def close(self, kept: list[Row], work: Work) -> None:
        """All is stored."""

    @cute.jit
    def _store(self, row: Row, key: Int32, score: Float32) -> None:
        if key < row.columns:
            address = row.start + Int64(key) * 4
            pointer = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4)
            Array(pointer, shape=(1,)).store(score, 0)
