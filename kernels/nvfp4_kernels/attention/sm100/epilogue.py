"""From O and a row's sum to the result."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Float32, Int32, Int64, Uint8, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.attention.sm100.barriers import Barriers, wait_for_output
from nvfp4_kernels.attention.sm100.math import (
    LN_2,
    log2,
    multiply,
)
from nvfp4_kernels.attention.sm100.rows import (
    PIECE,
    WarpRows,
    fresh_lane,
    place_of,
    store_piece,
)
from nvfp4_kernels.attention.sm100.scheduler import Row, Work
from nvfp4_kernels.attention.sm100.softmax import Sum
from nvfp4_kernels.attention.sm100.tile import AttentionTile, Variant
from nvfp4_kernels.device.math import LOG2_E, NEGATIVE_INFINITY, exp2
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.sm100.limits import WARP_ROWS
from nvfp4_kernels.sm100.tensor_memory import load_columns

WIDTHS = (32, 16, 8)  # columns that a thread holds at a time


@dataclass(frozen=True)
class Result:
    """Of a launch, in global memory.

    Attributes:
        out: [rows, query heads, D]; of a split, float32 [splits, rows, query heads, D].
        lse: float32, the same without D.
        sinks: float32 [query heads]; null if there are none.
        rows, heads: those dimensions.
    """

    out: cute.Pointer
    lse: cute.Pointer
    sinks: cute.Pointer
    rows: Int32
    heads: Int32


@dataclass(frozen=True)
class Epilogue:
    """Role of the softmax warps, once per CTA. Rows that the sequence lacks are left out."""

    tile: AttentionTile
    variant: Variant

    @property
    def _dtype(self) -> type[cutlass.Numeric]:
        return Float32 if self.variant.split else TYPES[self.variant.dtype]

    @property
    def _staged(self) -> type[cutlass.Numeric]:
        """What rows are in shared memory."""
        return self._dtype

    @property
    def _bytes(self) -> int:
        """Of a row that are staged at once: what the row of the queries has room for."""
        return min(self.tile.row_bytes, self.tile.head_dim * self._staged.width // 8)

    @property
    def _columns(self) -> int:
        """Of a row that are staged at once."""
        return self._bytes * 8 // self._staged.width

    def _written(self, row: Row, tiles: Int32) -> cutlass.Boolean:
        """Nobody reads the result of a part of a split that has no keys."""
        return row.live & (tiles > 0) if self.variant.split else row.live

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
        """``shared``: the queries', read by now; ``value_scale``: of stored values."""
        tile = self.tile
        head = work.kv_head * work.group + row.head
        place = self._place(result, work, row, head)
        lse, factor = self._normalise(result, sums, head)
        factor = factor * value_scale
        if row.live:
            Array(result.lse, shape=(1,)).store(lse, place)
        units = self._units(row, tiles, place)
        if tiles > 0:
            wait_for_output(tile, barriers, query_tile, tiles - 1)
        source = lanes + tile.output_column(query_tile)
        for first in cutlass.range_constexpr(0, tile.head_dim, self._columns):
            self._stage_columns(shared, warp, source + first, tiles, factor)
            ptx.bar_warp_sync(cute.arch.FULL_MASK)
            self._send(result, shared, units, warp, first * self._dtype.width // 8)
            ptx.bar_warp_sync(cute.arch.FULL_MASK)
        # What frees tensor memory comes after the last reads of it.
        ptx.tcgen05_fence(ptx.Tcgen05Fence.BEFORE_THREAD_SYNC)

    @cute.jit
    def _place(self, result: Result, work: Work, row: Row, head: Int32) -> Int64:
        """Number of this thread's row in the result."""
        place = Int64(work.first_query + row.token)
        if cutlass.const_expr(self.variant.split):
            place += Int64(work.split) * result.rows
        return place * result.heads + head

    def _units(self, row: Row, tiles: Int32, place: Int64) -> Int32:
        """Where the row begins, in units of 16 bytes; negative if it is not to be written."""
        units = (place * (self.tile.head_dim * self._dtype.width // 128)).to(Int32)
        return cutlass.select_(self._written(row, tiles), units, Int32(-1))

    @cute.jit
    def _stage_columns(
        self, shared: Array, warp: Int32, source: Int32, tiles: Int32, factor: Float32
    ) -> None:
        """Columns of O from ``source`` on, as many as there is room for."""
        own = warp * WARP_ROWS + fresh_lane()
        width = next(width for width in WIDTHS if self._columns % width == 0)
        for start in cutlass.range_constexpr(0, self._columns, width):
            values = [Float32(0.0)] * width
            if tiles > 0:
                values = load_columns(source + start, width)
                ptx.tcgen05_wait(ptx.Tcgen05Wait.LOAD)
            self._stage(shared, own, start, multiply(values, factor))

    def _stage(self, shared: Array, own: Int32, column: int, values: list[Float32]) -> None:
        """This thread's row, 16 bytes at a time."""
        each = 128 // self._staged.width
        for start in range(0, len(values), each):
            part = Vector.from_elements(tuple(values[start : start + each]), Float32)
            byte = (column + start) * self._staged.width // 8
            offset = place_of(self._bytes, own, byte)
            shared.store(part.to(self._staged).bitcast(Uint8), offset, alignment=16)

    def _send(
        self, result: Result, shared: Array, units: Int32, warp: Int32, first_byte: int
    ) -> None:
        """The warp's rows, by lanes side by side."""
        rows = WarpRows(self._bytes, fresh_lane())
        for turn in range(rows.turns):
            target = rows.of_row(units, turn)
            place = warp * WARP_ROWS + rows.row(turn)
            for number in range(rows.pieces):
                byte = rows.byte(number)
                offset = place_of(self._bytes, place, byte)
                piece = shared.load(offset, PIECE, alignment=16)
                store_piece(result.out, target, byte + first_byte, piece, target >= 0)

    @cute.jit
    def _normalise(self, result: Result, sums: Sum, head: Int32) -> tuple[Float32, Float32]:
        """LSE of a row, and the factor of its O."""
        peak, weight = sums.peak, sums.weight
        shrink = Float32(1.0)
        unit = Float32(1 << self.tile.probability_shift)
        if cutlass.const_expr(self.variant.sinks and not self.variant.split):
            sink = Array(result.sinks, shape=(1,)).load(head) * LOG2_E
            top = cute.arch.fmax(peak, sink)
            top = cutlass.select_(top == NEGATIVE_INFINITY, Float32(0.0), top)
            shrink = exp2(peak - top)
            weight = weight * shrink + unit * exp2(sink - top)
            peak = top
        empty = weight == 0.0
        factor = cutlass.select_(empty, Float32(0.0), shrink / weight)
        lse = (peak + log2(weight * (1.0 / unit))) * LN_2
        return cutlass.select_(empty, Float32(NEGATIVE_INFINITY), lse), factor
