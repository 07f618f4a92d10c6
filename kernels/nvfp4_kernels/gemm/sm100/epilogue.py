"""Epilogue warps: from accumulators to the result."""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Int32, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.device.mbarrier import arrive_where, wait
from nvfp4_kernels.gemm.sm100.barriers import Barriers
from nvfp4_kernels.gemm.sm100.result import Chunk, OutputTensor
from nvfp4_kernels.gemm.sm100.scaling import Begun, RowScaling, Scaling, ScalingOperands
from nvfp4_kernels.gemm.sm100.scheduler import SchedulerState, tile_coord
from nvfp4_kernels.gemm.sm100.split_k import SplitK
from nvfp4_kernels.gemm.sm100.store import Store
from nvfp4_kernels.gemm.sm100.store_columns import ColumnStore, Row
from nvfp4_kernels.gemm.sm100.store_nvfp4 import Nvfp4Store
from nvfp4_kernels.gemm.sm100.tile import EpilogueConfig, Tile
from nvfp4_kernels.sm100.limits import CTA_ROWS, WARP_ROWS
from nvfp4_kernels.sm100.tensor_memory import tensor_pointer

LOAD_COLUMNS = 32  # columns of each accumulator that a thread holds at a time
_EARLY_COLUMNS = 16  # columns of a load, while the next columns are in flight
_FINISHED_COLUMNS = 8  # columns computed while the previous columns are stored


@dataclass(frozen=True)
class Scratch:
    """Shared memory of one epilogue warp; None for parts that a variant does not need.

    Attributes:
        slots: store ring, or transpose buffer.
        vectors: factors along the accumulator's columns, then biases.
        partials: ``Partials`` of split-K.
    """

    slots: Array
    vectors: Array
    partials: Any


@dataclass(frozen=True)
class Sums:
    """Accumulated sums of a tile, as one warp accesses them.

    Attributes:
        partials: ``Partials`` of split-K, or None.
        source: tensor memory address of the accumulators' first column, in the warp's lanes.
        rank: rank of the CTA in its cluster.
        index: index of the tile among the CTA's tiles.
        accumulator: index of the tile's accumulator.
        warp, lane: index of the warp in the CTA, and of the thread in the warp.
    """

    partials: Any
    source: Int32
    rank: Int32
    index: Int32
    accumulator: Int32
    warp: Int32
    lane: Int32


@dataclass(frozen=True)
class Epilogue:
    """Role of four warps, each on the 32 lanes of tensor memory that it can access."""

    tile: Tile
    output: EpilogueConfig

    @property
    def chunk(self) -> int:
        """Number of columns stored at once."""
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
        """Finish all tiles; on return, TMA stores from shared memory may still be in flight."""
        tile, output = self.tile, self.output
        scaling, split = Scaling(tile, output), SplitK(tile)
        lane = cute.arch.lane_idx()
        leader = ptx.elect_sync()  # the same lane throughout: bulk groups are a thread's own
        lanes = tensor + ((warp * WARP_ROWS) << 16)
        # The preceding kernel may still use the factors and the result's memory.
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
            columns = None
            if cutlass.const_expr(self._direct):
                columns = ColumnStore(output).row(result, row, column, coord)
            wait(barriers.acc_full.subview(accumulator), index // tile.accumulators)
            ptx.tcgen05_fence(ptx.Tcgen05Fence.AFTER_THREAD_SYNC)
            source = lanes + accumulator * tile.accumulator_stride
            if cutlass.const_expr(tile.split_k > 1):
                split.exchange(scratch.partials, source, state.rank, index, warp, lane)
            acc_empty = barriers.acc_empty.subview(accumulator)
            sums = Sums(scratch.partials, source, state.rank, index, accumulator, warp, lane)
            if cutlass.const_expr(self._direct):
                self._finish_columns(sums, columns, own, scratch.vectors, acc_empty, leader)
            else:
                place = Chunk(row, column, coord.batch, coord.weight, index)
                self._finish_chunks(sums, place, own, result, scratch, acc_empty, leader)
            if cutlass.const_expr(tile.split_k > 1):
                more = index + 1 < state.num_tiles
                split.release(scratch.partials, state.rank, lane, more)
        # Freeing tensor memory comes after the last reads of it.
        ptx.tcgen05_fence(ptx.Tcgen05Fence.BEFORE_THREAD_SYNC)

    @cute.jit
    def _finish_chunks(
        self,
        sums: Sums,
        place: Chunk,
        own: RowScaling,
        result: OutputTensor,
        scratch: Scratch,
        acc_empty: Array,
        leader: Boolean,
    ) -> None:
        """Finish a tile chunk by chunk.

        ``place``: position of this thread's first value, with the tile's index as ``number``.
        """
        tile, output = self.tile, self.output
        scaling = Scaling(tile, output)
        store = (Nvfp4Store if output.dtype == "nvfp4" else Store)(tile, output)
        chunks = tile.split_columns // self.chunk
        for number in cutlass.range_constexpr(chunks):
            offset = self._offset(number, self.chunk, sums.accumulator)
            values = []
            shares = number <= self._last_shared(self.chunk)
            # All that the next tile's MMAs wait for, before any arithmetic.
            width = self.chunk if self._overlaps and shares else LOAD_COLUMNS
            for start in cutlass.range_constexpr(0, self.chunk, width):
                here = offset + start
                count = min(width, self.chunk)
                first = number == 0 and start == 0
                loaded = self._addends(sums, here, count, first, added=True)
                last = start + width >= self.chunk
                if cutlass.const_expr(last and number == self._last_shared(self.chunk)):
                    self._release(acc_empty, leader)
                added = [_added(addends, range(count)) for addends in loaded]
                values += scaling.apply(added, own, scratch.vectors, here)
            chunk = replace(
                place, column=place.column + offset, number=place.number * chunks + number
            )
            store.put(result, scratch.slots, chunk, values, leader)

    @cute.jit
    def _finish_columns(
        self,
        sums: Sums,
        row: Row,
        own: RowScaling,
        vectors: Array,
        acc_empty: Array,
        leader: Boolean,
    ) -> None:
        """Finish a tile a few columns at a time: stores overlap with the math of later columns."""
        tile, scaling, store = self.tile, Scaling(self.tile, self.output), ColumnStore(self.output)
        width = min(LOAD_COLUMNS if tile.split_k > 1 else _EARLY_COLUMNS, tile.split_columns)
        loads = tile.split_columns // width
        at_once = width <= _FINISHED_COLUMNS  # one pass: split-K partials arrive before any math
        begun: list[tuple[Row, int, Begun]] = []
        here = self._offset(0, width, sums.accumulator)
        following = self._addends(sums, here, width, first=True, added=at_once)
        for number in cutlass.range_constexpr(loads):
            loaded, first = following, here
            if cutlass.const_expr(tile.split_k == 1):
                ptx.tcgen05_wait(ptx.Tcgen05Wait.LOAD)
            if cutlass.const_expr(number == self._last_shared(width)):
                self._release(acc_empty, leader)
            if cutlass.const_expr(number + 1 < loads):
                here = self._offset(number + 1, width, sums.accumulator)
                following = self._addends(sums, here, width, first=False, added=at_once)
            rest = store.from_token(row, first) if self._overlaps else row
            for start in cutlass.range_constexpr(0, width, _FINISHED_COLUMNS):
                ahead = range(start, min(start + _FINISHED_COLUMNS, width))
                part = [_added(addends, ahead) for addends in loaded]
                token = start if self._overlaps else first + start
                begun.append((rest, token, scaling.begin(part, own, vectors, first + start)))
                if cutlass.const_expr(len(begun) > 1):
                    self._finish(store, *begun.pop(0))
        for columns in begun:
            self._finish(store, *columns)

    def _finish(self, store: ColumnStore, row: Row, token: int, begun: Begun) -> None:
        store.put(row, token, Scaling(self.tile, self.output).finish(begun))

    @cute.jit
    def drain(self) -> None:
        """Wait until TMA stores have read this CTA's shared memory, so that the CTA may exit."""
        if cutlass.const_expr(self.output.store == "tma"):
            # By every lane: lanes without stores have nothing to wait for.
            ptx.cp_async_bulk_wait_group(0, read=True)

    @property
    def _direct(self) -> bool:
        """Whether values are stored straight from registers, consecutive tokens per thread."""
        return self.tile.swap_ab and self.output.dtype != "nvfp4"

    @property
    def _overlaps(self) -> bool:
        """Whether the two accumulators share tensor memory columns."""
        return self.tile.overlap > 0 and self.tile.accumulators == 2 and self.tile.split_k == 1

    def _offset(self, number: int, width: int, accumulator: Int32) -> Int32 | int:
        """First column of load ``number`` of ``width`` columns; shared columns are loaded first."""
        if not self._overlaps:
            return number * width
        backwards = self.tile.split_columns - (number + 1) * width
        forwards = number * width
        return backwards + accumulator * (forwards - backwards)

    def _last_shared(self, width: int) -> int:
        """Index of the load of ``width`` columns after which the next tile's MMAs may start."""
        if not self._overlaps:
            return self.tile.split_columns // width - 1
        return -(-self.tile.overlap // width) - 1

    @cute.jit
    def _release(self, acc_empty: Array, leader: Boolean) -> None:
        """Release the accumulator to the MMA warp in the tile's first CTA.

        The fence alone orders reads of tensor memory: an arrival with cluster scope would wait for
        this warp's stores to global memory.
        """
        ptx.tcgen05_fence(ptx.Tcgen05Fence.BEFORE_THREAD_SYNC)
        ptx.bar_warp_sync(cute.arch.FULL_MASK)
        if cutlass.const_expr(self.tile.two_cta):
            if leader:
                first = ptx.cluster_ctarank() & ~1
                ptx.mbarrier_arrive(ptx.mapa(acc_empty, first), scope=ptx.MemScope.CTA)
        else:
            arrive_where(acc_empty, leader)

    def _addends(
        self, sums: Sums, column: Int32 | int, count: int, first: bool, added: bool
    ) -> list[list[Vector]]:
        """Load ``count`` columns of every product, from ``column`` on.

        With split-K a column has several addends, for the caller to add up in order, unless
        ``added``; a tile's ``first`` load waits for the peers' partial sums. If ``_direct`` and
        without split-K, the caller must wait for the loads.
        """
        tile = self.tile
        if tile.split_k > 1:
            return SplitK(tile).addends(
                sums.partials,
                sums.source,
                sums.rank,
                range(column, column + count),
                sums.warp,
                sums.lane,
                sums.index if first else None,
                added,
            )
        loaded = [
            [
                ptx.tcgen05_ld(
                    ptx.Tcgen05LdStShape.SHAPE_32X32B,
                    tensor_pointer(sums.source + product * tile.columns + column),
                    num=count,
                )
            ]
            for product in range(tile.weights)
        ]
        if not self._direct:
            ptx.tcgen05_wait(ptx.Tcgen05Wait.LOAD)
        return loaded


def _added(addends: list[Vector], columns: range) -> Vector:
    """Sum of the addends in ``columns``, added in order."""
    first, *others = (each[columns.start : columns.stop] for each in addends)
    return sum(others, first)
