"""Queries, from global memory into the shared memory of the tensor core."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Float32, Int32, Int64, Uint8, Uint32, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.attention.sm100.math import largest, to_e4m3
from nvfp4_kernels.attention.sm100.rows import WarpRows, load_piece, place_of
from nvfp4_kernels.attention.sm100.scheduler import Row, Work
from nvfp4_kernels.attention.sm100.tile import AttentionTile, Variant
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.sm100.limits import WARP_ROWS

UNIT = 8  # elements of 16 bytes
HELD = 16  # pieces of 16 bytes that a lane asks for before it uses one
E4M3_MAX = 448.0
SMALLEST_SCALE = 2.0**-126  # that has an inverse


@dataclass(frozen=True)
class Queries:
    """Queries in global memory; strides count elements and are multiples of 8."""

    data: cute.Pointer
    batch_stride: Int64
    token_stride: Int64
    head_stride: Int64


@dataclass(frozen=True)
class QueryLoader:
    """Copies, or quantises to E4M3 with a scale per row. What the softmax warps do first."""

    tile: AttentionTile
    variant: Variant

    @property
    def _rows(self) -> WarpRows:
        return WarpRows(2 * self.tile.head_dim, cute.arch.lane_idx())

    @cute.jit
    def run(self, queries: Queries, shared: Array, work: Work, row: Row, warp: Int32) -> Float32:
        """The warp's rows of a query tile; zeros where there is none. Returns this row's scale."""
        rows = self._rows
        start = self._start(queries, work, row)
        scale = Float32(1.0)
        step = max(1, HELD // rows.pieces)
        for first in cutlass.range_constexpr(0, rows.turns, step):
            turns = range(first, min(first + step, rows.turns))
            loaded = [self._load(queries, start, turn) for turn in turns]
            for index in cutlass.range_constexpr(len(turns)):
                place = warp * WARP_ROWS + rows.row(turns[index])
                if cutlass.const_expr(self.tile.fp8):
                    found = self._quantize(shared, place, loaded[index])
                    # Back to the thread that has this row in the softmax.
                    lane = cute.arch.lane_idx()
                    found = cute.arch.shuffle_sync(found, lane % rows.at_once * rows.lanes)
                    mine = lane // rows.at_once == turns[index]
                    scale = cutlass.select_(mine, found, scale)
                else:
                    self._copy(shared, place, loaded[index])
        ptx.fence_proxy(ptx.Proxy.ASYNC_SHARED, space=ptx.SharedSpace.shared_cta)
        return scale

    @cute.jit
    def _start(self, queries: Queries, work: Work, row: Row) -> Int32:
        """Of this thread's row, in units of 16 bytes; negative if there is none."""
        head, token = work.kv_head * work.group + row.head, work.first_query + row.token
        start = Int64(head) * queries.head_stride
        if cutlass.const_expr(self.variant.layout == "dense"):
            token = row.token
            start += Int64(work.batch) * queries.batch_stride
        start += Int64(token) * queries.token_stride
        return cutlass.select_(row.live, (start // UNIT).to(Int32), Int32(-1))

    def _load(self, queries: Queries, start: Int32, turn: int) -> list[Vector]:
        rows = self._rows
        units = rows.of_row(start, turn)
        return [
            load_piece(queries.data, units, rows.byte(number), units >= 0)
            for number in range(rows.pieces)
        ]

    def _copy(self, shared: Array, place: Int32, pieces: list[Vector]) -> None:
        rows = self._rows
        for number, piece in enumerate(pieces):
            offset = place_of(rows.row_bytes, place, rows.byte(number))
            shared.store(piece.bitcast(Uint8), offset, alignment=16)

    def _quantize(self, shared: Array, place: Int32, pieces: list[Vector]) -> Float32:
        """The row's scale, in each of its lanes."""
        rows, dtype = self._rows, TYPES[self.variant.dtype]
        values = [list(piece.bitcast(dtype).to(Float32).to_elements()) for piece in pieces]
        top = largest([cute.math.abs(value) for piece in values for value in piece])
        distance = 1
        while distance < rows.lanes:
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, distance))
            distance *= 2
        # A row of zeros needs no scale, and the inverse of a subnormal one would be infinite.
        scale = cute.arch.fmax(top * (1.0 / E4M3_MAX), SMALLEST_SCALE)
        scale = cutlass.select_(top > 0.0, scale, Float32(1.0))
        inverse = 1.0 / scale
        for number, piece in enumerate(values):
            words = to_e4m3([value * inverse for value in piece])
            packed = Vector.from_elements(tuple(words), Uint32).bitcast(Uint8)
            target = place_of(self.tile.row_bytes, place, rows.byte(number) // 2)
            shared.store(packed, target, alignment=8)
        return scale
