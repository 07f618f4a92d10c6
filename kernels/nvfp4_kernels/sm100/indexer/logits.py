"""Where scores go: rows of logits in global memory.

What else takes scores, in the place of ``LogitRows``, has its methods: ``open`` what a thread keeps
of each of its queries, ``hide`` the key tiles that none of them sees, ``put`` a key's score.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Float32, Int32, Int64

from nvfp4_kernels.sm100.indexer.tile import KEYS, ScoreTile, Variant
from nvfp4_kernels.sm100.indexer.work import Range, Ranges, Work, range_of

NEGATIVE_INFINITY = float("-inf")


@dataclass(frozen=True)
class Row:
    """What a thread keeps of a query.

    Attributes:
        start: of its logits in the result, in elements.
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

    def open(self, ranges: Ranges, work: Work, first: Int32) -> list[Row]:
        """Of the queries from ``first`` of the CTA on that a group has."""
        return [
            self._row(ranges, work, first + number) for number in range(self.tile.group_queries)
        ]

    def _row(self, ranges: Ranges, work: Work, number: Int32) -> Row:
        live = number < work.queries
        query = work.first_query + cutlass.min(number, work.queries - 1)
        return Row(
            start=Int64(query) * work.columns,
            columns=Int32(cutlass.select_(live, work.columns, Int32(0))),
            seen=range_of(self.variant, ranges, query, work.columns),
        )

    @cute.jit
    def hide(
        self, out: cute.Pointer, rows: list[Row], work: Work, turn: Int32, lane: Int32
    ) -> None:
        """−∞ for the hidden tiles; ``lane``: this thread's of a key tile."""
        turns = self.tile.turns
        for step in cutlass.range(cute.ceil_div(work.hidden - turn, turns), unroll=1):
            key = work.hidden_tile(step * turns + turn) * KEYS + lane
            for row in rows:
                self._store(out, row, key, Float32(NEGATIVE_INFINITY))

    def put(self, out: cute.Pointer, row: Row, key: Int32, score: Float32) -> None:
        """Of a key of a tile that some query of the CTA sees, this one or another."""
        # Selected, not multiplied: what a key that is not seen scores may be NaN.
        seen = (key >= row.seen.begin) & (key < row.seen.end)
        score = Float32(cutlass.select_(seen, score, Float32(NEGATIVE_INFINITY)))
        self._store(out, row, key, score)

    @cute.jit
    def _store(self, out: cute.Pointer, row: Row, key: Int32, score: Float32) -> None:
        if key < row.columns:
            Array(out, shape=(1,)).store(score, row.start + key)
