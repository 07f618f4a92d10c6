"""The epilogue warps: a key's score for each query, a weighted sum over the query's heads."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Float32, Int32
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.device.mbarrier import wait
from nvfp4_kernels.indexer.sm100.barriers import Barriers
from nvfp4_kernels.indexer.sm100.consumer import Consumer, Place
from nvfp4_kernels.indexer.sm100.scheduler import Ranges, Work
from nvfp4_kernels.indexer.sm100.tile import FACTOR_BYTES, GROUP_WARPS, KEYS, LANE_BYTES, ScoreTile
from nvfp4_kernels.indexer.sm100.variant import Variant
from nvfp4_kernels.indexer.sm100.weights import WeightLoader, Weights, is_doubled
from nvfp4_kernels.sm100.barriers import hand_over
from nvfp4_kernels.sm100.limits import WARP_ROWS
from nvfp4_kernels.sm100.tensor_memory import load_columns

LOADED = 16  # most columns of one tcgen05.ld; the last ones are summed under the next
CHAINS = 2  # of pairs of sums, so that an addition need not wait for the one before
NEAREST = ptx.FPRoundingMode.RN

Pair = tuple[Float32, Float32]


@dataclass(frozen=True)
class Epilogue:
    """Role of four warps per group. A thread has a key of each tile to itself."""

    tile: ScoreTile
    variant: Variant
    consumer: Consumer

    def place(self, warp: Int32) -> Place:
        """Of a warp of the CTA. What there is only one of is known at compile time."""
        number, groups, turns = warp // GROUP_WARPS, self.tile.groups, self.tile.turns
        group = number % groups if groups > 1 else Int32(0)
        turn = number // groups if turns > 1 else Int32(0)
        return Place(group, turn, warp % GROUP_WARPS)

    @cute.jit
    def run(
        self,
        given: Weights,
        ranges: Ranges,
        factors: Array,
        out: Any,
        memory: Any,
        barriers: Barriers,
        tensor: Int32,
        work: Work,
        place: Place,
    ) -> None:
        """All key tiles of this warp's turn; ``factors``: ring of FP8 keys' scales."""
        tile = self.tile
        leader = ptx.elect_sync()
        first = place.group * tile.group_queries
        kept = self.consumer.open(out, memory, ranges, work, place)
        weights = WeightLoader(tile, self.variant).run(given, work, first)
        columns = tensor + ((place.warp * WARP_ROWS) << 16) + place.group * tile.group_columns
        # One lap is round all accumulators, so that which it is, is known at compile time.
        steps = tile.accumulators // tile.turns
        for lap in cutlass.range(cute.ceil_div(work.tiles, tile.accumulators), unroll=1):
            self.consumer.meet(kept, work, lap)
            for step in cutlass.range_constexpr(steps):
                accumulator = step * tile.turns + place.turn
                index = lap * tile.accumulators + accumulator
                if index < work.tiles:
                    factor = self._factor(factors, barriers, index, place, leader)
                    wait(barriers.ready.subview(accumulator), lap)
                    ptx.tcgen05_fence(ptx.Tcgen05Fence.AFTER_THREAD_SYNC)
                    drained = barriers.drained.subview(accumulator)
                    source = columns + accumulator * tile.columns
                    scores = self._scores(source, weights, drained, leader)
                    key = (work.first_tile + index) * KEYS + place.lane
                    self._put(kept, key, scores, factor)
        self.consumer.close(kept, work)

    def _put(self, kept: Any, key: Int32, scores: list[Float32], factor: Float32) -> None:
        for number, score in enumerate(scores):
            self.consumer.put(kept, number, key, score * factor if self.tile.factored else score)

    @cute.jit
    def _factor(
        self, factors: Array, barriers: Barriers, index: Int32, place: Place, leader: Boolean
    ) -> Float32:
        """Of this thread's key, which FP8 keys have; its stage of the ring is then given back."""
        tile = self.tile
        factor = Float32(1.0)
        if cutlass.const_expr(tile.factored):
            stage = index % tile.stages
            wait(barriers.scaled.subview(stage), index // tile.stages)
            offset = stage * tile.key_scale_bytes + cute.arch.lane_idx() * LANE_BYTES
            word = factors.load(offset + place.warp * FACTOR_BYTES, FACTOR_BYTES, alignment=4)
            factor = word.bitcast(Float32)[0]
            ptx.bar_warp_sync(cute.arch.FULL_MASK)
            if leader:
                ptx.mbarrier_arrive(barriers.empty.subview(stage))
        return factor

    # --- sums over heads ------------------------------------------------------------------------

    def _pieces(self) -> list[tuple[int, int, int]]:
        """(query, head, columns) of each load: powers of two, none of heads that there are not."""
        pieces = []
        for query in range(self.tile.group_queries):
            head = 0
            while head < self.tile.heads:
                left = self.tile.heads - head
                width = min(LOADED, 1 << (left.bit_length() - 1))
                pieces.append((query, head, width))
                head += width
        return pieces

    def _scores(
        self, columns: Int32, weights: list[list[Float32]], drained: Array, leader: Boolean
    ) -> list[Float32]:
        """Of each query; the accumulator is given back before the last columns are summed."""
        tile, pieces = self.tile, self._pieces()

        def load(number: int) -> list[Float32]:
            query, head, width = pieces[number]
            return load_columns(columns + query * tile.head_columns + head, width)

        sums = [_zeros() for _ in range(tile.group_queries)]
        following = load(0)
        for number, (query, head, width) in enumerate(pieces):
            ptx.tcgen05_wait(ptx.Tcgen05Wait.LOAD)
            products = following
            if number + 1 < len(pieces):
                following = load(number + 1)
            else:
                hand_over(drained, leader)
            self._add(sums[query], products, weights[query][head : head + width], head)
        return [_total(chains) for chains in sums]

    def _add(
        self, chains: list[Pair], products: list[Float32], weights: list[Float32], head: int
    ) -> None:
        """Two heads at a time; the last of an odd number has none beside it."""
        nothing = [Float32(0.0)] * (len(products) % 2)
        products, weights = products + nothing, weights + nothing
        for first in range(0, len(products), 2):
            pair = (head + first) // 2
            positive = self._relu(products[first : first + 2], is_doubled(self.tile, pair))
            factors = weights[first], weights[first + 1]
            chain = pair % CHAINS
            chains[chain] = ptx.fma_packed_f32x2(positive, factors, chains[chain], rnd=NEAREST)

    def _relu(self, values: list[Float32], doubled: bool) -> Pair:
        """NaN stays NaN. Doubled, of finite values only: x + abs(x) of −∞ would be NaN."""
        if doubled:
            first, second = (value + cute.math.abs(value) for value in values)
        else:
            first, second = (cute.arch.fmax(value, Float32(0.0), nan=True) for value in values)
        return first, second


def _zeros() -> list[Pair]:
    return [(Float32(0.0), Float32(0.0))] * CHAINS


def _total(chains: list[Pair]) -> Float32:
    while len(chains) > 1:
        halves = zip(chains[::2], chains[1::2], strict=True)
        chains = [ptx.add_packed_f32x2(a, b, rnd=NEAREST) for a, b in halves]
    return chains[0][0] + chains[0][1]
