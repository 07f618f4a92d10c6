"""Main loop of a warpgroup, which decodes weight tiles and multiplies them with the tokens."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Float32, Int32, Uint32
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.device.mbarrier import wait
from nvfp4_kernels.formats.fragments import STEPS
from nvfp4_kernels.gemm.sm90 import dequantize, folded
from nvfp4_kernels.gemm.sm90.loader import Ring
from nvfp4_kernels.gemm.sm90.scheduler import SchedulerState
from nvfp4_kernels.gemm.sm90.tile import Tile
from nvfp4_kernels.sm90 import warp_mma
from nvfp4_kernels.sm90.limits import ROW_BYTES, ActDtype
from nvfp4_kernels.sm90.wgmma import STEP_BYTES, descriptor, multiply, settled


@dataclass(frozen=True)
class Mma:
    """Role of a warpgroup; ``wgmma`` of a weight tile overlaps with decoding the next tile."""

    tile: Tile
    stages: int
    act: ActDtype

    @cute.jit
    def run(
        self, ring: Ring, state: SchedulerState, index: Int32, group: Int32
    ) -> list[list[Float32]]:
        """Compute the sums of one tile: this thread's fragment of each accumulator."""
        parts = self.tile.parts_in_turn
        if cutlass.const_expr(parts == 1):
            return self._part(ring, state, index, group, Int32(0), state.steps)
        total = self._zeros()
        for part in cutlass.range_constexpr(parts):
            first, end = (Int32(each) * state.steps // parts for each in (part, part + 1))
            sums = self._part(ring, state, index, group, first, end)
            total = [
                [so_far + value for so_far, value in zip(*both, strict=True)]
                for both in zip(total, sums, strict=True)
            ]
        return total

    def _zeros(self) -> list[list[Float32]]:
        tile = self.tile
        return [[Float32(0.0)] * (tile.tokens // 2) for _ in range(tile.accumulators)]

    @cute.jit
    def _part(
        self,
        ring: Ring,
        state: SchedulerState,
        index: Int32,
        group: Int32,
        first: Int32,
        end: Int32,
    ) -> list[list[Float32]]:
        """Compute the sums over this slice's K steps among ``first`` ≤ step < ``end``."""
        tile = self.tile
        sums = self._zeros()
        iterations, slices, own = end - first, tile.slices, group % tile.slices
        if cutlass.const_expr(slices > 1):
            iterations = (iterations - own + slices - 1) // slices
        for iteration in cutlass.range(iterations, unroll=self._unroll):
            step = iteration if slices == 1 else iteration * slices + own
            count = index * state.steps + first + step
            wait(ring.full.subview(count % self.stages), count // self.stages)
            if cutlass.const_expr(tile.uses_mma_sync):
                sums = self._few(sums, ring, count % self.stages, group)
                self._release(ring, count)
            else:
                sums = self._many(sums, ring, count, step, group)
        if cutlass.const_expr(not tile.uses_mma_sync):
            ptx.wgmma_wait_group_sync_aligned(0)
            if iterations > 0:
                last = end - 1 if slices == 1 else (iterations - 1) * slices + own + first
                self._release(ring, index * state.steps + last)
            sums = [settled(each) for each in sums]
        return sums

    @cute.jit
    def _few(
        self, sums: list[list[Float32]], ring: Ring, stage: Int32, group: Int32
    ) -> list[list[Float32]]:
        """Multiply one stage with ``mma.sync``."""
        tile = self.tile
        lane = cute.arch.lane_idx()
        for inside in cutlass.range_constexpr(tile.k_tiles):
            tokens = self._tokens(ring, stage, inside)
            b = [
                [warp_mma.load_tokens(tokens, first, half, lane) for half in range(STEPS // 2)]
                for first in range(0, tile.tokens, 8)
            ]
            for each in cutlass.range_constexpr(tile.accumulators):
                operands = self._operands(ring, stage, inside, each, group)
                total = sums[each]
                for s, a in enumerate(operands):
                    total = [
                        value
                        for eight in range(tile.tokens // 8)
                        for value in warp_mma.multiply(
                            total[4 * eight : 4 * eight + 4],
                            a,
                            b[eight][s // 2][s % 2 * 2 : s % 2 * 2 + 2],
                            self.act,
                        )
                    ]
                sums[each] = total
        return sums

    @cute.jit
    def _many(
        self, sums: list[list[Float32]], ring: Ring, count: Int32, step: Int32, group: Int32
    ) -> list[list[Float32]]:
        """Multiply one stage with ``wgmma``; the last MMAs are still in flight afterwards."""
        tile = self.tile
        stage = count % self.stages
        for inside in cutlass.range_constexpr(tile.k_tiles):
            b = descriptor(self._tokens(ring, stage, inside))
            for each in cutlass.range_constexpr(tile.accumulators):
                a = self._operands(ring, stage, inside, each, group)
                ptx.wgmma_fence_aligned()
                total = sums[each]
                for s in cutlass.range_constexpr(STEPS):
                    total = multiply(total, a[s], b + s * (STEP_BYTES >> 4), self.act)
                sums[each] = total
                ptx.wgmma_commit_group_sync_aligned()
                ptx.wgmma_wait_group_sync_aligned(1)
                if cutlass.const_expr(inside == 0 and each == 0):
                    # All earlier MMAs are done.
                    if step >= tile.slices:
                        self._release(ring, count - tile.slices)
        return sums

    def _tokens(self, ring: Ring, stage: Int32, inside: int) -> Array:
        tile = self.tile
        return ring.tokens.subview((stage * tile.k_tiles + inside) * tile.tokens * ROW_BYTES)

    def _operands(
        self, ring: Ring, stage: Int32, inside: int, each: int, group: Int32
    ) -> list[list[Uint32]]:
        """Load and decode a K tile of the weight: operand A of each K step."""
        tile = self.tile
        operand = stage * tile.operands + group // tile.slices * tile.accumulators + each
        coord = operand * tile.k_tiles + inside
        data = ring.data.subview(coord * (tile.data_bytes // 4))
        scales = ring.scales.subview(coord * (tile.scale_bytes // 4))
        warp, lane = cute.arch.warp_idx() % 4, cute.arch.lane_idx()
        if tile.fp8:
            return folded.operands(data, scales, warp, lane)
        words, factors = dequantize.load(data, scales, warp, lane)
        return [dequantize.dequantized(words, factors, s, self.act) for s in range(STEPS)]

    @property
    def _unroll(self) -> int:
        """Unroll factor; 2 alternates the A registers, which MMAs in flight still read."""
        return 2 if self.tile.k_tiles * self.tile.accumulators == 1 else 1

    def _release(self, ring: Ring, count: Int32) -> None:
        """Release the stage of K step ``count``: every lane arrives, which race detectors follow.

        A single lane's arrival after a warp barrier was no faster.
        """
        ptx.mbarrier_arrive(ring.empty.subview(count % self.stages))
