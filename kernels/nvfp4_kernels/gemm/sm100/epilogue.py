"""The epilogue warps: from accumulators to the result."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Int32, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.device.mbarrier import wait
from nvfp4_kernels.gemm.sm100.result import Chunk, Result
from nvfp4_kernels.gemm.sm100.scaling import Factors, Scaling
from nvfp4_kernels.gemm.sm100.scheduler import Work, place_of
from nvfp4_kernels.gemm.sm100.split_k import Split
from nvfp4_kernels.gemm.sm100.store import Store
from nvfp4_kernels.gemm.sm100.store_nvfp4 import Nvfp4Store
from nvfp4_kernels.gemm.sm100.tile import Output, Tile
from nvfp4_kernels.sm100.limits import CTA_ROWS, WARP_ROWS
from nvfp4_kernels.sm100.tensor_memory import tensor_pointer

LOAD_COLUMNS = 32  # that a thread holds of each accumulator at a time


@dataclass(frozen=True)
class Scratch:
    """One warp's shared memory; None for what a variant does without.

    Attributes:
        slots: the store ring, or room to turn blocks in.
        vectors: factors along the accumulator's columns, then the bias.
        parts: ``Parts`` of a split K.
    """

    slots: Array
    vectors: Array
    parts: Any


@dataclass(frozen=True)
class Epilogue:
    """Role of four warps, each on the 32 lanes of tensor memory that it reaches."""

    tile: Tile
    output: Output

    @property
    def chunk(self) -> int:
        """Columns that go out at once."""
        return min(self.output.store_columns, self.tile.share)

    @cute.jit
    def run(
        self,
        factors: Factors,
        result: Result,
        scratch: Scratch,
        ready: Array,
        drained: Array,
        tensor: Int32,
        work: Work,
        warp: Int32,
    ) -> None:
        """All tiles; then waits until its shared memory and barriers may go."""
        tile, output = self.tile, self.output
        scaling, split = Scaling(tile, output), Split(tile)
        store = (Nvfp4Store if output.dtype == "nvfp4" else Store)(tile, output)
        lane = cute.arch.lane_idx()
        leader = ptx.elect_sync()  # the same lane throughout: bulk groups are a thread's own
        lanes = tensor + ((warp * WARP_ROWS) << 16)
        # Factors, and the result's memory, may be in use by the kernel before this one.
        ptx.griddepcontrol(ptx.GridDepAction.WAIT)
        for index in cutlass.range(work.mine, unroll=1):
            place = place_of(tile, work, index)
            row = place.m * tile.rows + work.rank % tile.ctas * CTA_ROWS + warp * WARP_ROWS + lane
            column = place.n * tile.columns
            if cutlass.const_expr(tile.split_k > 1):
                column = column + work.rank * tile.share
            own = scaling.of_row(factors, result, row, place)
            scaling.stage_columns(factors, result, scratch.vectors, column, place, lane)
            accumulator = index % tile.accumulators
            wait(ready.subview(accumulator), index // tile.accumulators)
            ptx.tcgen05_fence(ptx.Tcgen05Fence.AFTER_THREAD_SYNC)
            source = lanes + accumulator * tile.accumulator_stride
            if cutlass.const_expr(tile.split_k > 1):
                split.exchange(scratch.parts, source, work.rank, index, warp, lane)
            chunks = tile.share // self.chunk
            for number in cutlass.range_constexpr(chunks):
                offset = self._offset(number, chunks, accumulator)
                values = []
                for start in cutlass.range_constexpr(0, self.chunk, LOAD_COLUMNS):
                    here = offset + start
                    sums = self._sums(source, scratch.parts, work.rank, here, warp, lane)
                    last = start + LOAD_COLUMNS >= self.chunk
                    if cutlass.const_expr(last and number == self._last_shared(chunks)):
                        self._release(drained.subview(accumulator), leader)
                    values += scaling.apply(sums, own, scratch.vectors, here)
                chunk = Chunk(row, column + offset, place.batch, index * chunks + number)
                store.put(result, scratch.slots, chunk, values, leader)
            if cutlass.const_expr(tile.split_k > 1):
                split.give_back(scratch.parts, work.rank, lane)
        # What frees tensor memory comes after the last reads of it.
        ptx.tcgen05_fence(ptx.Tcgen05Fence.BEFORE_THREAD_SYNC)
        store.finish(leader)
        if cutlass.const_expr(tile.split_k > 1):
            split.finish(scratch.parts, work.mine)

    def _offset(self, number: int, chunks: int, accumulator: Int32) -> Int32 | int:
        """First column of a chunk: overlapping accumulators begin with what they share."""
        tile = self.tile
        if tile.overlap == 0 or tile.accumulators == 1 or tile.split_k > 1:
            return number * self.chunk
        backwards = (chunks - 1 - number) * self.chunk
        forwards = number * self.chunk
        return backwards + accumulator * (forwards - backwards)

    def _last_shared(self, chunks: int) -> int:
        """The chunk after which the next tile's MMAs may start."""
        tile = self.tile
        if tile.overlap == 0 or tile.accumulators == 1 or tile.split_k > 1:
            return chunks - 1
        return -(-tile.overlap // self.chunk) - 1

    @cute.jit
    def _release(self, drained: Array, leader: Boolean) -> None:
        """Tells the tile's first CTA, whose thread issues the MMAs."""
        ptx.tcgen05_fence(ptx.Tcgen05Fence.BEFORE_THREAD_SYNC)
        ptx.bar_warp_sync(cute.arch.FULL_MASK)
        if leader:
            if cutlass.const_expr(self.tile.two_sm):
                first = ptx.cluster_ctarank() & ~1
                ptx.mbarrier_arrive(ptx.mapa(drained, first))
            else:
                ptx.mbarrier_arrive(drained)

    def _sums(
        self,
        source: Int32,
        parts: Any,
        rank: Int32,
        column: Int32 | int,
        warp: Int32,
        lane: Int32,
    ) -> list[Vector]:
        """The next columns of every product."""
        tile, count = self.tile, min(LOAD_COLUMNS, self.chunk)
        if parts is not None:
            split, columns = Split(tile), range(column, column + count)
            return [
                split.added(parts, source, rank, product, columns, warp, lane)
                for product in range(tile.weights)
            ]
        sums = [
            ptx.tcgen05_ld(
                ptx.Tcgen05LdStShape.SHAPE_32X32B,
                tensor_pointer(source + product * tile.columns + column),
                num=count,
            )
            for product in range(tile.weights)
        ]
        ptx.tcgen05_wait(ptx.Tcgen05Wait.LOAD)
        return sums
