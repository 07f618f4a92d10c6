"""Split-K: reduction of partial sums over the CTAs of a cluster, and over slices in each CTA."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Float32, Int32, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.formats.fragments import TILE
from nvfp4_kernels.gemm.sm90.tile import BARRIER, Tile
from nvfp4_kernels.sm90.limits import WARPGROUP


@dataclass(frozen=True)
class SplitK:
    """Reduction in which every CTA of the cluster finishes a share of the rows.

    Partial sums are float32 [part of K, product, row of this CTA's share, token]. The cluster
    synchronises twice: when all CTAs have started, and when all partial sums have arrived; the
    cluster barrier was faster than an mbarrier in each CTA. The load warp contributes no part but
    synchronises too, as all threads of a cluster must.
    """

    tile: Tile

    def start(self) -> None:
        """Arrive at the cluster's start barrier; every thread calls this before its role."""
        if self.tile.split_k > 1:
            ptx.barrier_cluster_arrive_relaxed()

    @cute.jit
    def send(self, sums: list[list[Float32]], parts: Array, rank: Int32, group: Int32) -> None:
        """Send a warpgroup's fragments to the CTAs that finish their rows."""
        tile = self.tile
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        lane = thread % 32
        upper = thread // 32 * 16 + lane // 4
        part, team = rank * tile.slices + group % tile.slices, group // tile.slices
        if cutlass.const_expr(tile.split_k > 1):
            ptx.barrier_cluster_wait()
        for product in cutlass.range_constexpr(tile.weights):
            for half in cutlass.range_constexpr(2):
                row = team * TILE + upper + 8 * half
                target = ptx.mapa(parts, row // tile.split_rows)
                first = self._place(part, product, row % tile.split_rows) + lane % 4 * 2
                for eight in cutlass.range_constexpr(0, tile.tokens, 8):
                    at = eight // 2 + 2 * half
                    pair = Vector.from_elements((sums[product][at], sums[product][at + 1]), Float32)
                    target.store(pair, first + eight, alignment=8)
        if cutlass.const_expr(tile.split_k > 1):
            ptx.barrier_cluster_arrive()

    def wait(self) -> None:
        """Wait until all partial sums have arrived; called by the multiplying warpgroups."""
        tile = self.tile
        if tile.split_k > 1:
            ptx.barrier_cluster_wait()
        else:
            ptx.barrier_cta_sync(BARRIER, thread_count=tile.warpgroups * WARPGROUP)

    def join_cluster_barriers(self) -> None:
        """Take part in the cluster barriers without sending: load warps, and CTAs without a tile.

        Either all CTAs of a cluster have a tile, or none has. In a cluster without tiles all
        threads could exit, as exited threads are not waited for; but every arrival is paired with a
        wait.
        """
        if self.tile.split_k > 1:
            ptx.barrier_cluster_wait()
            ptx.barrier_cluster_arrive()
            ptx.barrier_cluster_wait()

    def added(self, parts: Array, product: int, row: Int32, token: Int32) -> Float32:
        """Sum of an element's partial sums, in an order independent of the order of arrival."""
        total = Float32(0.0)
        for part in range(self.tile.parts):
            total = total + parts.load(self._place(Int32(part), product, row) + token)
        return total

    def _place(self, part: Int32, product: int, row: Int32) -> Int32:
        tile = self.tile
        return ((part * tile.weights + product) * tile.split_rows + row) * tile.part_pitch
