"""From what the warps of a cluster have to the result."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Float32, Int32, Int64, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.decode_attention.sm90.mainloop import Part
from nvfp4_kernels.decode_attention.sm90.scheduler import Work
from nvfp4_kernels.decode_attention.sm90.tile import EIGHT, THREADS, WARPS, DecodeTile, Variant
from nvfp4_kernels.device.math import LOG2_E, NEGATIVE_INFINITY, exp2, finite
from nvfp4_kernels.device.types import TYPES

FOUR = 4  # elements that a thread finishes at a time


@dataclass(frozen=True)
class Result:
    """``data`` [token, head, D], and the sinks of the heads."""

    data: cute.Pointer
    sinks: cute.Pointer


@dataclass(frozen=True)
class Merge:
    """Every CTA of a cluster finishes a share of the result, always in the same order.

    A warp's part lies where its ring was: float32 [head, D], then peak and weight of each head.
    """

    tile: DecodeTile
    variant: Variant

    @property
    def part_words(self) -> int:
        """From a warp's part to the next one's."""
        return self.tile.stages * self.tile.stage_bytes // 4

    @cute.jit
    def run(self, part: Part, parts: Array, result: Result, work: Work, warp: Int32) -> None:
        """``parts``: rings of all warps of this CTA."""
        self._write(part, parts.subview(warp * self.part_words))
        self._meet()
        tile = self.tile
        thread = cute.arch.thread_idx()[0]
        for first in cutlass.range_constexpr(0, tile.share, THREADS):
            own = first + thread
            four = work.rank * tile.share + own
            if own < tile.share and four < tile.group * tile.head_dim // FOUR:
                self._finish(parts, result, work, four)
        if cutlass.const_expr(tile.splits > 1):
            # Shared memory stays while others read it; nothing is handed over.
            cute.arch.cluster_arrive_relaxed()
            ptx.barrier_cluster_wait()

    def _meet(self) -> None:
        """All parts of the cluster are there."""
        if self.tile.splits > 1:
            ptx.barrier_cluster_arrive()
            ptx.barrier_cluster_wait()
        else:
            ptx.barrier_cta_sync()

    @cute.jit
    def _write(self, part: Part, own: Array) -> None:
        tile = self.tile
        lane = cute.arch.lane_idx()
        for eight in cutlass.range_constexpr(tile.eights):
            weight = part.weights[eight]
            for distance in cutlass.range_constexpr(1, 3):
                weight = weight + cute.arch.shuffle_sync_bfly(weight, distance)
            if lane % 4 == 0:
                sums = Vector.from_elements((part.peaks[eight], weight), Float32)
                at = tile.sums_at + (eight * EIGHT + lane // 4) * 2
                own.store(sums, at, alignment=8)
            head = eight * EIGHT + lane % 4 * 2
            for step in cutlass.range_constexpr(tile.steps):
                for c in cutlass.range_constexpr(4):
                    at = (head + c % 2) * tile.pitch + step * 16 + c // 2 * 8 + lane // 4
                    own.store(part.sums[eight][4 * step + c], at)

    @cute.jit
    def _finish(self, parts: Array, result: Result, work: Work, four: Int32) -> None:
        """Four elements of a head."""
        tile = self.tile
        head, at = four // (tile.head_dim // FOUR), four % (tile.head_dim // FOUR) * FOUR
        rings = self._rings(parts)
        sums = [
            Vector(ring.load(tile.sums_at + head * 2, 2, alignment=8)).to_elements()
            for ring in rings
        ]
        peak = Float32(NEGATIVE_INFINITY)
        for each in sums:
            peak = cute.arch.fmax(peak, Float32(each[0]))
        row = work.kv_head * tile.group + head
        sink = Float32(NEGATIVE_INFINITY)
        if cutlass.const_expr(self.variant.sinks):
            sink = Float32(Array(result.sinks, shape=(1,)).load(row)) * LOG2_E
            peak = cute.arch.fmax(peak, sink)
        peak = finite(peak)
        weight = exp2(sink - peak) if self.variant.sinks else Float32(0.0)
        values = [Float32(0.0)] * FOUR
        for ring, each in zip(rings, sums, strict=True):
            fade = exp2(Float32(each[0]) - peak)
            weight = weight + Float32(each[1]) * fade
            own = Vector(ring.load(head * tile.pitch + at, FOUR, alignment=16)).to_elements()
            values = [v + Float32(o) * fade for v, o in zip(values, own, strict=True)]
        # Nothing is seen by a row that is there for its place only.
        inverse = cutlass.select_(weight > 0.0, cute.arch.rcp_approx(weight), Float32(0.0))
        dtype = TYPES[self.variant.dtype]
        found = Vector.from_elements(tuple(v * inverse for v in values), Float32).to(dtype)
        heads = cute.arch.grid_dim()[1] * tile.group
        start = (Int64(work.sequence) * heads + row) * tile.head_dim
        Array(result.data, shape=(1,)).store(found, start + at, alignment=8)

    def _rings(self, parts: Array) -> list[Array]:
        """Of all warps of the cluster."""
        tile = self.tile
        ctas = [parts]
        if tile.splits > 1:
            ctas = [ptx.mapa(parts, rank) for rank in range(tile.splits)]
        return [cta.subview(warp * self.part_words) for cta in ctas for warp in range(WARPS)]
