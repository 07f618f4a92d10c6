"""Epilogue warps: from accumulators to the result."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Int32, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.device.mbarrier import wait
from nvfp4_kernels.gemm.sm100.barriers import Barriers
from nvfp4_kernels.gemm.sm100.result import Chunk, OutputTensor
from nvfp4_kernels.gemm.sm100.scaling import Scaling, ScalingOperands
from nvfp4_kernels.gemm.sm100.scheduler import SchedulerState, tile_coord
from nvfp4_kernels.gemm.sm100.split_k import SplitK
from nvfp4_kernels.gemm.sm100.store import Store
from nvfp4_kernels.gemm.sm100.store_nvfp4 import Nvfp4Store
from nvfp4_kernels.gemm.sm100.tile import EpilogueConfig, Tile
from nvfp4_kernels.sm100.limits import CTA_ROWS, WARP_ROWS
from nvfp4_kernels.sm100.tensor_memory import tensor_pointer

LOAD_COLUMNS = 32  # that a thread holds of each accumulator at a time


@dataclass(frozen=True)
class Scratch:
    """One warp's shared memory; None for what a variant does without.

    Attributes:
        slots: the store ring, or room to turn blocks in.
        vectors: factors along the accumulator's columns, then the bias.
        partials: ``Partials`` of a split K.
    """

    slots: Array
    vectors: Array
    partials: Any


@dataclass(frozen=True)
class Epilogue:
    """Role of four warps, each on the 32 lanes of tensor memory that it reaches."""

    tile: Tile
    output: EpilogueConfig

    @property
    def chunk(self) -> int:
        """Columns that go out at once."""
        return self.output.chunk(self.tile)

    @cute.jit
    def run(
        self,
        operands: ScalingOperands,
        result: OutputTensor,
        scratch: Scratch,
        barriers: Barriers,
        tensor: Int32,
        state: SchedulerState,
        warp: Int32,
    ) -> None:
        """Finish all tiles; results may still be on their way out of shared memory."""
        tile, output = self.tile, self.output
        scaling, split = Scaling(tile, output), SplitK(tile)
        store = (Nvfp4Store if output.dtype == "nvfp4" else Store)(tile, output)
        lane = cute.arch.lane_idx()
        leader = ptx.elect_sync()  # the same lane throughout: bulk groups are a thread's own
        lanes = tensor + ((warp * WARP_ROWS) << 16)
        # Factors, and the result's memory, may be in use by the kernel before this one.
        if cutlass.const_expr(not tile.counts_first):
            ptx.griddepcontrol(ptx.GridDepAction.WAIT)
        for index in cutlass.range(state.num_tiles, unroll=1):
            coord = tile_coord(tile, state, index)
            row = coord.m * tile.rows + state.rank % tile.ctas * CTA_ROWS + warp * WARP_ROWS + lane
            column = coord.n * tile.columns
            if cutlass.const_expr(tile.split_k > 1):
                column = column + state.rank * tile.split_columns
            own = scaling.row_scaling(operands, result, row, coord)
            scaling.stage_columns(operands, result, scratch.vectors, column, coord, lane)
            accumulator = index % tile.accumulators
            wait(barriers.acc_full.subview(accumulator), index // tile.accumulators)
            ptx.tcgen05_fence(ptx.Tcgen05Fence.AFTER_THREAD_SYNC)
            source = lanes + accumulator * tile.accumulator_stride
            if cutlass.const_expr(tile.split_k > 1):
                split.exchange(scratch.partials, source, state.rank, index, warp, lane)
            chunks = tile.split_columns // self.chunk
            for number in cutlass.range_constexpr(chunks):
                offset = self._offset(number, chunks, accumulator)
                values = []
                shares = number <= self._last_shared(chunks)
                # All that the next tile's MMAs wait for, before any arithmetic.
                width = self.chunk if self._overlaps and shares else LOAD_COLUMNS
                for start in cutlass.range_constexpr(0, self.chunk, width):
                    here = offset + start
                    awaited = index if number == 0 and start == 0 else None
                    sums = self._sums(
                        source, scratch.partials, state.rank, here, width, warp, lane, awaited
                    )
                    last = start + width >= self.chunk
                    if cutlass.const_expr(last and number == self._last_shared(chunks)):
                        self._release(barriers.acc_empty.subview(accumulator), leader)
                    values += scaling.apply(sums, own, scratch.vectors, here)
                chunk = Chunk(
                    row, column + offset, coord.batch, coord.weight, index * chunks + number
                )
                store.put(result, scratch.slots, chunk, values, leader)
            if cutlass.const_expr(tile.split_k > 1):
                more = index + 1 < state.num_tiles
                split.release(scratch.partials, state.rank, lane, more)
        # What frees tensor memory comes after the last reads of it.
        ptx.tcgen05_fence(ptx.Tcgen05Fence.BEFORE_THREAD_SYNC)

    @cute.jit
    def drain(self) -> None:
        """Wait until results have left this CTA's shared memory, so that it may go."""
        if cutlass.const_expr(self.output.store == "tma"):
            # By every lane: those that have stored nothing have nothing to wait for.
            ptx.cp_async_bulk_wait_group(0, read=True)

    @property
    def _overlaps(self) -> bool:
        """Whether two accumulators share columns."""
        return self.tile.overlap > 0 and self.tile.accumulators == 2 and self.tile.split_k == 1

    def _offset(self, number: int, chunks: int, accumulator: Int32) -> Int32 | int:
        """First column of a chunk: overlapping accumulators begin with what they share."""
        if not self._overlaps:
            return number * self.chunk
        backwards = (chunks - 1 - number) * self.chunk
        forwards = number * self.chunk
        return backwards + accumulator * (forwards - backwards)

    def _last_shared(self, chunks: int) -> int:
        """Chunk after which the next tile's MMAs may start."""
        if not self._overlaps:
            return chunks - 1
        return -(-self.tile.overlap // self.chunk) - 1

    @cute.jit
    def _release(self, acc_empty: Array, leader: Boolean) -> None:
        """Release the accumulator to the tile's first CTA, whose thread issues the MMAs."""
        ptx.tcgen05_fence(ptx.Tcgen05Fence.BEFORE_THREAD_SYNC)
        ptx.bar_warp_sync(cute.arch.FULL_MASK)
        if leader:
            if cutlass.const_expr(self.tile.two_cta):
                first = ptx.cluster_ctarank() & ~1
                ptx.mbarrier_arrive(ptx.mapa(acc_empty, first))
            else:
                ptx.mbarrier_arrive(acc_empty)

    def _sums(
        self,
        source: Int32,
        partials: Any,
        rank: Int32,
        column: Int32 | int,
        width: int,
        warp: Int32,
        lane: Int32,
        awaited: Int32 | None,
    ) -> list[Vector]:
        """Load the next ``width`` columns, or as many as there are, of every product.

        ``awaited``: see ``SplitK.added``.
        """
        tile, count = self.tile, min(width, self.chunk)
        if partials is not None:
            split, columns = SplitK(tile), range(column, column + count)
            return [
                split.added(
                    partials,
                    source,
                    rank,
                    product,
                    columns,
                    warp,
                    lane,
                    None if product else awaited,
                )
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
