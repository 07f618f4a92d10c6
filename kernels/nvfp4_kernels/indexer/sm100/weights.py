"""Heads' weights, which epilogue threads keep in registers."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.indexer.sm100.scheduler import TileScheduler
from nvfp4_kernels.indexer.sm100.tile import PAIRS, ScoreTile
from nvfp4_kernels.indexer.sm100.variant import Variant


class HeadWeights(NamedTuple):
    """Weights of the heads in global memory.

    Attributes:
        weights: float32 [queries, num_heads].
        query_factors: scales of FP8 queries, [queries, num_heads]; null if the variant has none.
    """

    weights: cute.Pointer
    query_factors: cute.Pointer


def is_doubled(tile: ScoreTile, pair: int) -> bool:
    """Whether the relu of a query's ``pair``-th pair of heads is doubled, see ``ScoreTile``."""
    return pair * 3 % PAIRS < tile.doubled


@dataclass(frozen=True)
class WeightLoader:
    """Loader of a group's weights, [query][head]; an absent query gets the last query's weights."""

    tile: ScoreTile
    variant: Variant

    def run(
        self, pointers: HeadWeights, scheduler: TileScheduler, first: Int32
    ) -> list[list[Float32]]:
        """Load the weights of a group's queries, halved where relu is doubled.

        FP8 queries' scales multiply the weights. ``first``: index of the group's first query in the
        CTA.
        """
        rows = []
        for number in range(self.tile.group_queries):
            query = scheduler.first_query + cutlass.min(first + number, scheduler.num_queries - 1)
            row = self._row(pointers.weights, query)
            if self.variant.query_factors:
                factors = self._row(pointers.query_factors, query)
                row = [weight * factor for weight, factor in zip(row, factors, strict=True)]
            rows.append([self._halved(head, weight) for head, weight in enumerate(row)])
        return rows

    def _halved(self, head: int, weight: Float32) -> Float32:
        """Weight of a head, halved where relu is doubled."""
        return weight * 0.5 if is_doubled(self.tile, head // 2) else weight

    def _row(self, data: cute.Pointer, query: Int32) -> list[Float32]:
        """Load one float32 per head of a query."""
        heads = self.tile.num_heads
        width = 4 if heads % 4 == 0 else 1
        start = Int64(data.toint()) + Int64(query) * (heads * 4)
        row: list[Float32] = []
        for head in range(0, heads, width):
            row += _load(start + head * 4, width)
        return row


def _load(address: Int64, count: int) -> list[Float32]:
    """Load ``count``, 1 or 4, adjacent float32 numbers from global memory."""
    # Inline PTX keeps the loads together, so that all are in flight before one is waited for.
    names, kind = ("{$w0}", "f32") if count == 1 else ("{{$w0}, {$w1}, {$w2}, {$w3}}", "v4.f32")
    loaded = ptx.inline_ptx(
        f"ld.global.{kind} {names}, [{{$r0}}];",
        write_only_types=[Float32] * count,
        read_only_args=[address],
    )
    return [loaded] if count == 1 else list(loaded)
