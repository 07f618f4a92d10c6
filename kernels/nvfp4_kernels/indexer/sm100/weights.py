"""The heads' weights, in a thread's registers for as long as it lives."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.indexer.sm100.scheduler import Work
from nvfp4_kernels.indexer.sm100.tile import PAIRS, ScoreTile
from nvfp4_kernels.indexer.sm100.variant import Variant


@dataclass(frozen=True)
class Weights:
    """In global memory.

    Attributes:
        weights: float32 [queries, heads].
        query_factors: the same, of FP8 queries; null if the variant has none.
    """

    weights: cute.Pointer
    query_factors: cute.Pointer


def is_doubled(tile: ScoreTile, pair: int) -> bool:
    """Whether the ``pair``-th two heads of a query are; they are spread evenly."""
    return pair * 3 % PAIRS < tile.doubled


@dataclass(frozen=True)
class WeightLoader:
    """Reads those of a group's queries, [query][head]; those of a query there is not are any."""

    tile: ScoreTile
    variant: Variant

    def run(self, given: Weights, work: Work, first: Int32) -> list[list[Float32]]:
        """Of the queries from ``first`` of the CTA on, halved where relu is doubled."""
        rows = []
        for number in range(self.tile.group_queries):
            query = work.first_query + cutlass.min(first + number, work.queries - 1)
            row = self._row(given.weights, query)
            if self.variant.query_factors:
                factors = self._row(given.query_factors, query)
                row = [weight * factor for weight, factor in zip(row, factors, strict=True)]
            rows.append([self._halved(head, weight) for head, weight in enumerate(row)])
        return rows

    def _halved(self, head: int, weight: Float32) -> Float32:
        return weight * 0.5 if is_doubled(self.tile, head // 2) else weight

    def _row(self, data: cute.Pointer, query: Int32) -> list[Float32]:
        heads = self.tile.heads
        width = 4 if heads % 4 == 0 else 1
        start = Int64(data.toint()) + Int64(query) * (heads * 4)
        row: list[Float32] = []
        for head in range(0, heads, width):
            row += _load(start + head * 4, width)
        return row


def _load(address: Int64, count: int) -> list[Float32]:
    """1 or 4 numbers side by side."""
    # Asked for one after the other, so that all are on their way before one is waited for.
    names, kind = ("{$w0}", "f32") if count == 1 else ("{{$w0}, {$w1}, {$w2}, {$w3}}", "v4.f32")
    loaded = ptx.inline_ptx(
        f"ld.global.{kind} {names}, [{{$r0}}];",
        write_only_types=[Float32] * count,
        read_only_args=[address],
    )
    return [loaded] if count == 1 else list(loaded)
