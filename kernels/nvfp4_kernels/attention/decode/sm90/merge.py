"""Merge of the partial results of all warps of a cluster."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Array, Float32, Int32, Int64, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.attention.decode.sm90.mainloop import PartialResult
from nvfp4_kernels.attention.decode.sm90.scheduler import WorkTile
from nvfp4_kernels.attention.decode.sm90.tile import MMA_HEADS, THREADS, WARPS, DecodeTile, Variant
from nvfp4_kernels.device.math import LOG2_E, NEGATIVE_INFINITY, exp2, finite
from nvfp4_kernels.device.types import TYPES

VECTOR = 4  # elements that a thread writes at a time


class DecodeResult(NamedTuple):
    """Output ``out`` [token, head, D], and attention sinks ``sinks``, float32 [head] or null."""

    out: cute.Pointer
    sinks: cute.Pointer


@dataclass(frozen=True)
class Merge:
    """Merge over a cluster, in fixed order; every CTA writes an equal part of the output.

    A warp's partial result is stored in its ring: float32 O [head, D], then row_max and row_sum of
    each head.
    """

    tile: DecodeTile
    variant: Variant

    @property
    def part_words(self) -> int:
        """Stride between the warps' partial results, in words."""
        return self.tile.stages * self.tile.stage_bytes // 4

    @cute.jit
    def run(
        self,
        part: PartialResult,
        parts: Array,
        result: DecodeResult,
        v_scale: Float32,
        work: WorkTile,
        warp: Int32,
    ) -> None:
        """Store this warp's partial result, merge, multiply by ``v_scale`` and write.

        ``parts``: rings of the CTA's warps.
        """
        self._store_part(part, parts.subview(warp * self.part_words))
        self._sync()
        tile = self.tile
        thread = cute.arch.thread_idx()[0]
        for first in cutlass.range_constexpr(0, tile.split_vectors, THREADS):
            own = first + thread
            index = work.rank * tile.split_vectors + own
            if own < tile.split_vectors and index < tile.group * tile.head_dim // VECTOR:
                self._merge_vector(parts, result, v_scale, work, index)
        if cutlass.const_expr(tile.splits > 1):
            # A CTA must not exit while a peer can still read its shared memory.
            cute.arch.cluster_arrive_relaxed()
            ptx.barrier_cluster_wait()

    def _sync(self) -> None:
        """Barrier over all threads of the cluster."""
        if self.tile.splits > 1:
            ptx.barrier_cluster_arrive()
            ptx.barrier_cluster_wait()
        else:
            ptx.barrier_cta_sync()

    @cute.jit
    def _store_part(self, part: PartialResult, own: Array) -> None:
        """Store this warp's partial result to the warp's shared memory ``own``."""
        tile = self.tile
        lane = cute.arch.lane_idx()
        for head_tile in cutlass.range_constexpr(tile.head_tiles):
            row_sum = part.row_sum[head_tile]
            for distance in cutlass.range_constexpr(1, 3):
                row_sum = row_sum + cute.arch.shuffle_sync_bfly(row_sum, distance)
            if lane % 4 == 0:
                state = Vector.from_elements((part.row_max[head_tile], row_sum), Float32)
                at = tile.state_offset + (head_tile * MMA_HEADS + lane // 4) * 2
                own.store(state, at, alignment=8)
            head = head_tile * MMA_HEADS + lane % 4 * 2
            for step in cutlass.range_constexpr(tile.steps):
                for c in cutlass.range_constexpr(4):
                    at = (head + c % 2) * tile.o_stride + step * 16 + self._element(c // 2, lane)
                    own.store(part.o[head_tile][4 * step + c], at)

    def _element(self, half: int, lane: Int32) -> Int32:
        """Index among 16 elements of D of a lane's accumulator row; see ``Mainloop._values``."""
        return lane // 4 * 2 + half if self.tile.fp8 else half * 8 + lane // 4

    @cute.jit
    def _merge_vector(
        self,
        parts: Array,
        result: DecodeResult,
        v_scale: Float32,
        work: WorkTile,
        index: Int32,
    ) -> None:
        """Merge and write the ``index``-th 4-element vector of O of the KV head's query heads."""
        tile = self.tile
        head, at = index // (tile.head_dim // VECTOR), index % (tile.head_dim // VECTOR) * VECTOR
        rings = self._rings(parts)
        states = [
            Vector(ring.load(tile.state_offset + head * 2, 2, alignment=8)).to_elements()
            for ring in rings
        ]
        row_max = Float32(NEGATIVE_INFINITY)
        for state in states:
            row_max = cute.arch.fmax(row_max, Float32(state[0]))
        row = work.kv_head * tile.group + head
        sink = Float32(NEGATIVE_INFINITY)
        if cutlass.const_expr(self.variant.sinks):
            sink = Float32(Array(result.sinks, shape=(1,)).load(row)) * LOG2_E
            row_max = cute.arch.fmax(row_max, sink)
        row_max = finite(row_max)
        row_sum = exp2(sink - row_max) if self.variant.sinks else Float32(0.0)
        values = [Float32(0.0)] * VECTOR
        for ring, state in zip(rings, states, strict=True):
            rescale = exp2(Float32(state[0]) - row_max)
            row_sum = row_sum + Float32(state[1]) * rescale
            own = Vector(ring.load(head * tile.o_stride + at, VECTOR, alignment=16)).to_elements()
            values = [v + Float32(o) * rescale for v, o in zip(values, own, strict=True)]
        # A padding row sees no key.
        inverse = cutlass.select_(row_sum > 0.0, cute.arch.rcp_approx(row_sum), Float32(0.0))
        if cutlass.const_expr(tile.fp8):
            inverse = inverse * v_scale
        dtype = TYPES[self.variant.dtype]
        merged = Vector.from_elements(tuple(v * inverse for v in values), Float32).to(dtype)
        heads = cute.arch.grid_dim()[1] * tile.group
        start = (Int64(work.sequence) * heads + row) * tile.head_dim
        Array(result.out, shape=(1,)).store(merged, start + at, alignment=8)

    def _rings(self, parts: Array) -> list[Array]:
        """Rings of all warps of the cluster."""
        tile = self.tile
        ctas = [parts]
        if tile.splits > 1:
            ctas = [ptx.mapa(parts, rank) for rank in range(tile.splits)]
        return [cta.subview(warp * self.part_words) for cta in ctas for warp in range(WARPS)]
