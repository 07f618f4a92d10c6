"""Epilogue warps: a key's score for each query, a weighted sum over the query's heads."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Float32, Int32
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.device.mbarrier import wait
from nvfp4_kernels.indexer.sm100.barriers import Barriers
from nvfp4_kernels.indexer.sm100.scheduler import KeyRanges, TileScheduler
from nvfp4_kernels.indexer.sm100.tile import FACTOR_BYTES, GROUP_WARPS, KEYS, LANE_BYTES, ScoreTile
from nvfp4_kernels.indexer.sm100.variant import Variant
from nvfp4_kernels.indexer.sm100.visitor import EpilogueCoord, ScoreVisitor
from nvfp4_kernels.indexer.sm100.weights import HeadWeights, WeightLoader, is_doubled
from nvfp4_kernels.sm100.barriers import fence_and_arrive
from nvfp4_kernels.sm100.limits import WARP_ROWS
from nvfp4_kernels.sm100.tensor_memory import load_columns

MAX_LOAD = 16  # columns of one tcgen05.ld; summed under the next load
CHAINS = 2  # pairs of sums, so that an addition need not wait for the previous addition
NEAREST = ptx.FPRoundingMode.RN

Pair = tuple[Float32, Float32]


@dataclass(frozen=True)
class Epilogue:
    """Role of the epilogue warps: compute scores; a thread has one key of each key tile.

    Each ping-pong set has four warps per group of queries.
    """

    tile: ScoreTile
    variant: Variant
    visitor: ScoreVisitor

    def coord(self, warp: Int32) -> EpilogueCoord:
        """Coordinate of epilogue warp ``warp``; a sole group or set has the constant index 0."""
        number, groups, sets = warp // GROUP_WARPS, self.tile.groups, self.tile.pingpong
        group = number % groups if groups > 1 else Int32(0)
        pingpong = number // groups if sets > 1 else Int32(0)
        return EpilogueCoord(group, pingpong, warp % GROUP_WARPS)

    @cute.jit
    def run(
        self,
        head_weights: HeadWeights,
        ranges: KeyRanges,
        factors: Array,
        out: Any,
        storage: Any,
        barriers: Barriers,
        tensor: Int32,
        scheduler: TileScheduler,
        coord: EpilogueCoord,
    ) -> None:
        """Score all key tiles of this warp's ping-pong set.

        Args:
            head_weights: weights of the heads in global memory.
            ranges: keys that each query sees.
            factors: ring of key tiles' FP8 scales in shared memory.
            out: output of the launch, for the visitor.
            storage: the visitor's shared memory.
            barriers: mbarriers of the CTA.
            tensor: address of the tensor memory.
            scheduler: scheduler state of the CTA.
            coord: coordinate of this warp.
        """
        tile = self.tile
        leader = ptx.elect_sync()
        first = coord.group * tile.group_queries
        state = self.visitor.begin(out, storage, ranges, scheduler, coord)
        weights = WeightLoader(tile, self.variant).run(head_weights, scheduler, first)
        columns = tensor + ((coord.warp * WARP_ROWS) << 16) + coord.group * tile.group_columns
        # A phase fills every accumulator once, so that a step's accumulator is a constant.
        steps = tile.accumulators // tile.pingpong
        for phase in cutlass.range(cute.ceil_div(scheduler.num_tiles, tile.accumulators), unroll=1):
            self.visitor.begin_phase(state, scheduler, phase)
            for step in cutlass.range_constexpr(steps):
                accumulator = step * tile.pingpong + coord.pingpong
                index = phase * tile.accumulators + accumulator
                if index < scheduler.num_tiles:
                    factor = self._factor(factors, barriers, index, coord, leader)
                    wait(barriers.acc_full.subview(accumulator), phase)
                    ptx.tcgen05_fence(ptx.Tcgen05Fence.AFTER_THREAD_SYNC)
                    acc_empty = barriers.acc_empty.subview(accumulator)
                    source = columns + accumulator * tile.columns
                    scores = self._scores(source, weights, acc_empty, leader)
                    key = (scheduler.first_tile + index) * KEYS + coord.lane
                    self._visit(state, key, scores, factor)
        self.visitor.end(state, scheduler)

    def _visit(self, state: Any, key: Int32, scores: list[Float32], factor: Float32) -> None:
        """Pass a key's scores, multiplied by an FP8 key's scale, to the visitor."""
        for number, score in enumerate(scores):
            scaled = score * factor if self.tile.factored else score
            self.visitor.visit(state, number, key, scaled)

    @cute.jit
    def _factor(
        self,
        factors: Array,
        barriers: Barriers,
        index: Int32,
        coord: EpilogueCoord,
        leader: Boolean,
    ) -> Float32:
        """Load this thread's FP8 key's scale and release the key's stage; 1 in other formats."""
        tile = self.tile
        factor = Float32(1.0)
        if cutlass.const_expr(tile.factored):
            stage = index % tile.stages
            wait(barriers.sfk_full.subview(stage), index // tile.stages)
            offset = stage * tile.key_scale_bytes + cute.arch.lane_idx() * LANE_BYTES
            word = factors.load(offset + coord.warp * FACTOR_BYTES, FACTOR_BYTES, alignment=4)
            factor = word.bitcast(Float32)[0]
            ptx.bar_warp_sync(cute.arch.FULL_MASK)
            if leader:
                ptx.mbarrier_arrive(barriers.k_empty.subview(stage))
        return factor

    # --- sums over heads ------------------------------------------------------------------------

    def _loads(self) -> list[tuple[int, int, int]]:
        """Query, first head and number of heads of each tcgen05.ld; padding heads are skipped.

        The number of heads is a power of two up to ``MAX_LOAD``.
        """
        loads = []
        for query in range(self.tile.group_queries):
            head = 0
            while head < self.tile.num_heads:
                left = self.tile.num_heads - head
                width = min(MAX_LOAD, 1 << (left.bit_length() - 1))
                loads.append((query, head, width))
                head += width
        return loads

    def _scores(
        self, columns: Int32, weights: list[list[Float32]], acc_empty: Array, leader: Boolean
    ) -> list[Float32]:
        """Compute a score per query; release the accumulator when the last columns are loaded.

        ``columns``: tensor memory address of the group's part of the accumulator.
        """
        tile, loads = self.tile, self._loads()

        def load(number: int) -> list[Float32]:
            query, head, width = loads[number]
            return load_columns(columns + query * tile.head_columns + head, width)

        sums = [_zeros() for _ in range(tile.group_queries)]
        next_products = load(0)
        for number, (query, head, width) in enumerate(loads):
            ptx.tcgen05_wait(ptx.Tcgen05Wait.LOAD)
            products = next_products
            if number + 1 < len(loads):
                next_products = load(number + 1)
            else:
                fence_and_arrive(acc_empty, leader)
            self._add(sums[query], products, weights[query][head : head + width], head)
        return [_total(chains) for chains in sums]

    def _add(
        self, chains: list[Pair], products: list[Float32], weights: list[Float32], head: int
    ) -> None:
        """Add weighted ReLUs of the products of heads from ``head`` on, two heads at a time.

        The last head of an odd number is paired with zeros.
        """
        padding = [Float32(0.0)] * (len(products) % 2)
        products, weights = products + padding, weights + padding
        for first in range(0, len(products), 2):
            pair = (head + first) // 2
            positive = self._relu(products[first : first + 2], is_doubled(self.tile, pair))
            factors = weights[first], weights[first + 1]
            chain = pair % CHAINS
            chains[chain] = ptx.fma_packed_f32x2(positive, factors, chains[chain], rnd=NEAREST)

    def _relu(self, values: list[Float32], doubled: bool) -> Pair:
        """ReLU of two values; NaN stays NaN. If ``doubled``, x + abs(x), for finite x only."""
        if doubled:
            first, second = (value + cute.math.abs(value) for value in values)
        else:
            first, second = (cute.arch.fmax(value, Float32(0.0), nan=True) for value in values)
        return first, second


def _zeros() -> list[Pair]:
    """Initial sums of a query: zeros."""
    return [(Float32(0.0), Float32(0.0))] * CHAINS


def _total(chains: list[Pair]) -> Float32:
    """Score of a query: the total of all partial sums in ``chains``."""
    while len(chains) > 1:
        halves = zip(chains[::2], chains[1::2], strict=True)
        chains = [ptx.add_packed_f32x2(a, b, rnd=NEAREST) for a, b in halves]
    return chains[0][0] + chains[0][1]
