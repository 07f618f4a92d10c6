"""The end of a spread tile: each row's four parts become one result."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Float32, Int32, Uint8, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.attention.sm100.barriers import Barriers, wait_for_output
from nvfp4_kernels.attention.sm100.epilogue import Epilogue, Result
from nvfp4_kernels.attention.sm100.rows import PIECE, fresh_lane, place_of, store_piece
from nvfp4_kernels.attention.sm100.scheduler import Row, Work
from nvfp4_kernels.attention.sm100.softmax import Sum
from nvfp4_kernels.attention.sm100.tile import WARPS
from nvfp4_kernels.device.math import exp2, finite
from nvfp4_kernels.sm100.limits import WARP_ROWS

MEETING = 1  # number of the barrier at which the softmax warps wait for one another
THREADS = WARPS * WARP_ROWS
SUM_BYTES = 8  # of a row's ``Sum`` in shared memory
OUT_COLUMNS = 8  # that a thread adds up and stores at a time


@dataclass(frozen=True)
class SpreadEpilogue(Epilogue):
    """A warp's lanes of O are sums over its quarters of the key tiles.

    They meet in shared memory as float32, as many columns at a time as the queries left room for,
    and are added up in the order of the warps.
    """

    @property
    def _staged(self) -> type[cutlass.Numeric]:
        return Float32

    @cute.jit
    def run(
        self,
        result: Result,
        shared: Array,
        barriers: Barriers,
        lanes: Int32,
        query_tile: Int32,
        tiles: Int32,
        work: Work,
        row: Row,
        warp: Int32,
        sums: Sum,
        value_scale: Float32,
    ) -> None:
        """As ``Epilogue.run``."""
        tile = self.tile
        head = work.kv_head * work.group + row.head
        place = self._place(result, work, row, head)
        together, part = self._together(shared, sums, warp)
        lse, factor = self._normalise(result, together, head)
        factor = factor * part * value_scale
        if row.live and warp == 0:
            Array(result.lse, shape=(1,)).store(lse, place)
        units = self._units(row, tiles, place)
        if tiles > 0:
            wait_for_output(tile, barriers, query_tile, tiles - 1)
        source = lanes + tile.output_column(query_tile)
        for first in cutlass.range_constexpr(0, tile.head_dim, self._columns):
            self._meet()  # what was there has been read
            self._stage_columns(shared, warp, source + first, tiles, factor)
            self._meet()
            self._send_sums(result, shared, units, warp, first)
        # What frees tensor memory comes after the last reads of it.
        ptx.tcgen05_fence(ptx.Tcgen05Fence.BEFORE_THREAD_SYNC)

    def _meet(self) -> None:
        ptx.barrier_cta_sync(MEETING, thread_count=THREADS)

    def _together(self, shared: Array, sums: Sum, warp: Int32) -> tuple[Sum, Float32]:
        """A row's sum over all four warps, and what this warp's part of O is to be multiplied by.

        A quarter in which the row sees no key has neither weight nor peak.
        """
        lane = cute.arch.lane_idx()
        self._meet()
        own = Vector.from_elements((sums.peak, sums.weight), Float32).bitcast(Uint8)
        shared.store(own, (warp * WARP_ROWS + lane) * SUM_BYTES, alignment=SUM_BYTES)
        self._meet()
        parts = [self._sum_of(shared, other * WARP_ROWS + lane) for other in range(WARPS)]
        peak = parts[0].peak
        for part in parts[1:]:
            peak = cute.arch.fmax(peak, part.peak)
        weight = Float32(0.0)
        for part in parts:
            weight = weight + part.weight * exp2(part.peak - finite(peak))
        return Sum(peak, weight), exp2(sums.peak - finite(peak))

    def _sum_of(self, shared: Array, number: Int32) -> Sum:
        pair = shared.load(number * SUM_BYTES, SUM_BYTES, alignment=SUM_BYTES).bitcast(Float32)
        return Sum(pair[0], pair[1])

    def _send_sums(
        self, result: Result, shared: Array, units: Int32, warp: Int32, first: int
    ) -> None:
        """The rows' columns from ``first`` on, shared out over all threads."""
        items = self._columns // OUT_COLUMNS
        thread = warp * WARP_ROWS + fresh_lane()
        for begin in range(0, WARP_ROWS * items, THREADS):
            number = begin + thread
            row, column = number // items % WARP_ROWS, number % items * OUT_COLUMNS
            target = cute.arch.shuffle_sync(units, row)
            live = (target >= 0) & (number < WARP_ROWS * items)
            values = self._added(shared, row, column)
            for start in range(0, OUT_COLUMNS, PIECE * 8 // self._dtype.width):
                some = values[start : start + PIECE * 8 // self._dtype.width]
                piece = Vector.from_elements(tuple(some), Float32).to(self._dtype).bitcast(Uint8)
                byte = (first + column + start) * (self._dtype.width // 8)
                store_piece(result.out, target, byte, piece, live)

    def _added(self, shared: Array, row: Int32, column: Int32) -> list[Float32]:
        """Of the four parts, columns that one thread adds up."""
        total: list[Float32] = [Float32(0.0)] * OUT_COLUMNS
        for part in range(WARPS):
            found: list[Float32] = []
            for start in range(0, OUT_COLUMNS * 4, PIECE):
                offset = place_of(self._bytes, part * WARP_ROWS + row, column * 4 + start)
                piece = shared.load(offset, PIECE, alignment=16)
                found += piece.bitcast(Float32).to_elements()
            total = [a + b for a, b in zip(total, found, strict=True)]
        return total
