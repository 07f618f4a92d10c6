"""Loads of queries from global memory into the MMA operand in shared memory."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Array, Float32, Int32, Int64, Uint8, Uint32, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.attention.sm100.math import fmax_reduce, to_e4m3
from nvfp4_kernels.attention.sm100.rows import WarpRows, load_vector, swizzled_offset
from nvfp4_kernels.attention.sm100.scheduler import QueryRow, WorkTile
from nvfp4_kernels.attention.sm100.tile import AttentionTile, Variant
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.sm100.limits import WARP_ROWS

VECTOR = 8  # elements of 16 bytes
VECTORS_IN_FLIGHT = 16  # loads that a lane issues before it uses the first
E4M3_MAX = 448.0
MIN_SCALE = 2.0**-126  # smallest number with a finite inverse


class Queries(NamedTuple):
    """Queries in global memory; strides count elements and are multiples of 8."""

    q: cute.Pointer
    batch_stride: Int64
    token_stride: Int64
    head_stride: Int64


@dataclass(frozen=True)
class QueryLoader:
    """Prologue of the softmax warps: copy queries, or quantise to E4M3 with a scale per row."""

    tile: AttentionTile
    variant: Variant

    @property
    def _rows(self) -> WarpRows:
        return WarpRows(2 * self.tile.head_dim, cute.arch.lane_idx())

    @cute.jit
    def run(
        self, queries: Queries, shared: Array, work: WorkTile, row: QueryRow, warp: Int32
    ) -> Float32:
        """Load the warp's rows of a query tile, zeros past the last row.

        Returns the E4M3 scale of this thread's row; 1 for 16-bit queries.
        """
        rows = self._rows
        start = self.row_units(queries, work, row)
        scale = Float32(1.0)
        step = max(1, VECTORS_IN_FLIGHT // rows.vectors_per_lane)
        for first in cutlass.range_constexpr(0, rows.iterations, step):
            iterations = range(first, min(first + step, rows.iterations))
            loaded = [self._load(queries, start, iteration) for iteration in iterations]
            # Before any is stored, so that the shuffles of all rows overlap.
            scales = [self._row_scale(vectors) for vectors in loaded] if self.tile.fp8 else []
            for index in cutlass.range_constexpr(len(iterations)):
                target = warp * WARP_ROWS + rows.row(iterations[index])
                if cutlass.const_expr(self.tile.fp8):
                    self._quantize(shared, target, loaded[index], scales[index])
                    # Back to the thread that has this row in the softmax.
                    lane, per_iteration = cute.arch.lane_idx(), rows.rows_per_iteration
                    source = lane % per_iteration * rows.lanes_per_row
                    loaded_scale = cute.arch.shuffle_sync(scales[index], source)
                    own = lane // per_iteration == iterations[index]
                    scale = cutlass.select_(own, loaded_scale, scale)
                else:
                    self._copy(shared, target, loaded[index])
        ptx.fence_proxy(ptx.Proxy.ASYNC_SHARED, space=ptx.SharedSpace.shared_cta)
        return scale

    @cute.jit
    def row_units(self, queries: Queries, work: WorkTile, row: QueryRow) -> Int32:
        """Offset of this thread's row in units of 16 bytes; −1 past the last row."""
        head, token = work.kv_head * work.group + row.head, work.first_query + row.token
        start = Int64(head) * queries.head_stride
        if cutlass.const_expr(self.variant.layout == "dense"):
            token = row.token
            start += Int64(work.batch) * queries.batch_stride
        start += Int64(token) * queries.token_stride
        return cutlass.select_(row.live, (start // VECTOR).to(Int32), Int32(-1))

    def _load(self, queries: Queries, start: Int32, iteration: int) -> list[Vector]:
        rows = self._rows
        units = rows.from_row_owner(start, iteration)
        return [
            load_vector(queries.q, units, rows.byte(index), units >= 0)
            for index in range(rows.vectors_per_lane)
        ]

    def _copy(self, shared: Array, row: Int32, vectors: list[Vector]) -> None:
        rows = self._rows
        for index, vector in enumerate(vectors):
            offset = swizzled_offset(rows.row_bytes, row, rows.byte(index))
            shared.store(vector.bitcast(Uint8), offset, alignment=16)

    def _values(self, vector: Vector) -> list[Float32]:
        return list(vector.bitcast(TYPES[self.variant.dtype]).to(Float32).to_elements())

    def _row_scale(self, vectors: list[Vector]) -> Float32:
        """E4M3 scale of a row, in all lanes that hold the row."""
        amax = fmax_reduce(
            [cute.math.abs(value) for vector in vectors for value in self._values(vector)]
        )
        distance = 1
        while distance < self._rows.lanes_per_row:
            amax = cute.arch.fmax(amax, cute.arch.shuffle_sync_bfly(amax, distance))
            distance *= 2
        return row_scale(amax)

    def _quantize(self, shared: Array, row: Int32, vectors: list[Vector], scale: Float32) -> None:
        """Quantise this lane's vectors of a row to E4M3; store the codes to shared memory."""
        rows, inverse = self._rows, 1.0 / scale
        for index, vector in enumerate(vectors):
            words = to_e4m3([value * inverse for value in self._values(vector)])
            packed = Vector.from_elements(tuple(words), Uint32).bitcast(Uint8)
            target = swizzled_offset(self.tile.row_bytes, row, rows.byte(index) // 2)
            shared.store(packed, target, alignment=8)


def row_scale(amax: Float32) -> Float32:
    """E4M3 scale of a row whose largest magnitude is ``amax``; 1 for a row of zeros."""
    # A row of zeros needs no scale, and the inverse of a subnormal one would be infinite.
    scale = cute.arch.fmax(amax * (1.0 / E4M3_MAX), MIN_SCALE)
    return cutlass.select_(amax > 0.0, scale, Float32(1.0))
