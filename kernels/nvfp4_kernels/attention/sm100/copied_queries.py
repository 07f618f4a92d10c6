"""Quantisation to E4M3, by the softmax warps, of 16-bit queries that query warps have copied."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Array, Float32, Int32, Uint8, Uint32, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.attention.sm100.barriers import Barriers
from nvfp4_kernels.attention.sm100.math import fmax_reduce, mul_packed, to_e4m3
from nvfp4_kernels.attention.sm100.queries import row_scale
from nvfp4_kernels.attention.sm100.rows import VECTOR_BYTES, recomputed_lane, swizzled_offset
from nvfp4_kernels.attention.sm100.scheduler import WorkTile
from nvfp4_kernels.attention.sm100.tile import AttentionTile, Variant
from nvfp4_kernels.device.mbarrier import wait
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.sm100.limits import WARP_ROWS


@dataclass(frozen=True)
class CopiedQueries:
    """Prologue of the softmax warps in CTAs with a CLC scheduler; a thread has a whole row."""

    tile: AttentionTile
    variant: Variant

    @cute.jit
    def quantize(
        self,
        copied: Array,
        shared: Array,
        barriers: Barriers,
        work: WorkTile,
        query_tile: Int32,
        warp: Int32,
    ) -> Float32:
        """Quantise this thread's row of a query tile; return the row's E4M3 scale.

        Args:
            copied: rows of the query tile in 16 bits.
            shared: shared memory of the query tile; rows of the previous result, staged in this
                memory, must have been stored by the warp.
            barriers: mbarriers of the CTA.
            work: work tile; must have at least one key.
            query_tile: query tile of the warp.
            warp: index of the warp in the query tile.
        """
        own = warp * WARP_ROWS + recomputed_lane()
        wait(barriers.copied.subview(query_tile), work.before.work_tiles)
        vectors = self._load(copied, own)
        ptx.bar_warp_sync(cute.arch.FULL_MASK)
        if ptx.elect_sync():
            ptx.mbarrier_arrive(barriers.taken.subview(query_tile))
        scale = self._scale(vectors)
        wait(barriers.q_empty, work.before.work_tiles - 1)
        self._store(shared, own, vectors, 1.0 / scale)
        ptx.fence_proxy(ptx.Proxy.ASYNC_SHARED, space=ptx.SharedSpace.shared_cta)
        return scale

    def _load(self, copied: Array, own: Int32) -> list[Vector]:
        row_bytes = self.tile.copied_row_bytes
        return [
            copied.load(swizzled_offset(row_bytes, own, byte), VECTOR_BYTES, alignment=VECTOR_BYTES)
            for byte in range(0, row_bytes, VECTOR_BYTES)
        ]

    def _values(self, vector: Vector) -> list[Float32]:
        return list(vector.bitcast(TYPES[self.variant.dtype]).to(Float32).to_elements())

    def _scale(self, vectors: list[Vector]) -> Float32:
        values = [value for vector in vectors for value in self._values(vector)]
        return row_scale(fmax_reduce([cute.math.abs(value) for value in values]))

    def _store(self, shared: Array, own: Int32, vectors: list[Vector], inverse: Float32) -> None:
        """Store the row in E4M3: two 16-bit vectors become one."""
        for index, pair in enumerate(zip(vectors[::2], vectors[1::2], strict=True)):
            words = [
                word
                for vector in pair
                for word in to_e4m3(mul_packed(self._values(vector), inverse))
            ]
            packed = Vector.from_elements(tuple(words), Uint32).bitcast(Uint8)
            target = swizzled_offset(self.tile.row_bytes, own, index * VECTOR_BYTES)
            shared.store(packed, target, alignment=VECTOR_BYTES)
