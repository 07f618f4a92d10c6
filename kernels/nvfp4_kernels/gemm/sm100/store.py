"""Stores of finished values; each thread has a chunk of columns of one row."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Float32, Int32, Int64, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.gemm.sm100.result import Chunk, OutputTensor
from nvfp4_kernels.gemm.sm100.tile import STORE_SLOTS, EpilogueConfig, Tile
from nvfp4_kernels.sm100.limits import WARP_ROWS


@dataclass(frozen=True)
class Store:
    """Store of chunks: each warp stores its own 32 rows, without waiting for other warps.

    Rows and columns out of bounds are skipped.
    """

    tile: Tile
    output: EpilogueConfig

    @cute.jit
    def put(
        self,
        result: OutputTensor,
        slots: Array,
        chunk: Chunk,
        values: list[Float32],
        leader: Boolean,
    ) -> None:
        """Store one chunk of float32 values, one row per thread."""
        if cutlass.const_expr(self.output.store == "tma"):
            self._boxes(result, slots, chunk, values, leader)
        else:
            self._rows(result, chunk, values)

    @cute.jit
    def _boxes(
        self,
        result: OutputTensor,
        slots: Array,
        chunk: Chunk,
        values: list[Float32],
        leader: Boolean,
    ) -> None:
        """Store with TMA through a ring of boxes of 32 rows (tokens)."""
        lane = cute.arch.lane_idx()
        slot = slots.subview(chunk.number % STORE_SLOTS * (WARP_ROWS * self.output.box_columns))
        if leader:
            ptx.cp_async_bulk_wait_group(STORE_SLOTS - 1, read=True)
        ptx.bar_warp_sync(cute.arch.FULL_MASK)
        self._fill_row(slot, values, lane)
        ptx.fence_proxy(ptx.Proxy.ASYNC_SHARED, space=ptx.SharedSpace.shared_cta)
        ptx.bar_warp_sync(cute.arch.FULL_MASK)
        if leader:
            ptx.cp_async_bulk_tensor_global_shared_cta(
                result.tensor_map.get_ptr(), slot, [chunk.column, chunk.row - lane, chunk.batch]
            )
            ptx.cp_async_bulk_commit_group()

    def _fill_row(self, slot: Array, values: list[Float32], lane: Int32) -> None:
        """Write one row of a box to shared memory, swizzled against bank conflicts."""
        dtype = TYPES[self.output.dtype]
        piece = 128 // dtype.width  # elements in 16 bytes
        pieces = len(values) // piece
        for index in range(pieces):
            part = _vector(values[index * piece : (index + 1) * piece]).to(dtype)
            swizzled = index ^ (lane * self.output.box_bytes // 128 % pieces)
            slot.store(part, lane * len(values) + swizzled * piece, alignment=16)

    @cute.jit
    def _rows(self, result: OutputTensor, chunk: Chunk, values: list[Float32]) -> None:
        """Store a row straight from registers, 16 bytes or one element at a time."""
        dtype = TYPES[self.output.dtype]
        piece = 128 // dtype.width if self.output.store == "vector" else 1
        data = Array(result.data, shape=(1,))
        start = (Int64(chunk.batch) * result.m + chunk.row) * result.n + chunk.column
        left = result.n - chunk.column if chunk.row < result.m else Int32(0)
        for index in cutlass.range_constexpr(len(values) // piece):
            part = _vector(values[index * piece : (index + 1) * piece]).to(dtype)
            if index * piece < left:
                if cutlass.const_expr(piece == 1):
                    data.store(part[0], start + index)
                else:
                    data.store(part, start + index * piece, alignment=16)


def _vector(values: list[Float32]) -> Vector:
    return Vector.from_elements(values, Float32)
