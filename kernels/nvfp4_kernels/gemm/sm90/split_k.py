"""Split-K: reduction of partial sums over the CTAs of a cluster, and over slices in each CTA."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Float32, Int32, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.device.mbarrier import CLUSTER, store_async, wait
from nvfp4_kernels.formats.fragments import TILE
from nvfp4_kernels.gemm.sm90.tile import BARRIER, Tile
from nvfp4_kernels.sm90.limits import WARPGROUP


@dataclass(frozen=True)
class SplitK:
    """Reduction in which every CTA of the cluster finishes a share of the rows.

    Partial sums are float32 [part of K, product, row of this CTA's share, token]. The cluster
    synchronises once, when all CTAs have started. Partial sums are then sent by ``st.async``, which
    counts their bytes on the receiver's mbarrier: arrivals with release semantics at cluster scope
    would each cost a fence of the whole device, twice as long as the exchange itself on an H100.
    A CTA waits for every byte sent to it, so that it may exit as soon as it is done.
    """

    tile: Tile

    @property
    def bytes_received(self) -> int:
        """Bytes of partial sums that a CTA receives, its own included."""
        tile = self.tile
        return 4 * tile.parts * tile.weights * tile.split_rows * tile.tokens

    def init_barrier(self, received: Array | None) -> None:
        """Initialise the mbarrier ``received`` and expect all partial sums; one thread calls this.

        One phase suffices, as a CTA finishes at most one tile.
        """
        if self.tile.split_k > 1:
            ptx.mbarrier_init(received, 1)
            ptx.mbarrier_arrive_expect_tx(received, self.bytes_received)

    def start(self) -> None:
        """Arrive at the cluster's start barrier; every thread calls this before its role."""
        if self.tile.split_k > 1:
            ptx.barrier_cluster_arrive_relaxed()

    def wait_start(self) -> None:
        """Wait until all CTAs of the cluster have started.

        Every thread calls this once: as warpgroups before their first ``send``, the load warp and
        CTAs without a tile at the end, as every arrival is paired with a wait.
        """
        if self.tile.split_k > 1:
            ptx.barrier_cluster_wait()

    @cute.jit
    def send(
        self,
        sums: list[list[Float32]],
        parts: Array,
        received: Array | None,
        rank: Int32,
        group: Int32,
    ) -> None:
        """Send a warpgroup's fragments to the CTAs that finish their rows."""
        tile = self.tile
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        lane = thread % 32
        upper = thread // 32 * 16 + lane // 4
        part, team = rank * tile.slices + group % tile.slices, group // tile.slices
        self.wait_start()
        for product in cutlass.range_constexpr(tile.weights):
            for half in cutlass.range_constexpr(2):
                row = team * TILE + upper + 8 * half
                owner = row // tile.split_rows
                target = ptx.mapa(parts, owner)
                first = self._place(part, product, row % tile.split_rows) + lane % 4 * 2
                for eight in cutlass.range_constexpr(0, tile.tokens, 8):
                    at = eight // 2 + 2 * half
                    pair = sums[product][at], sums[product][at + 1]
                    if cutlass.const_expr(tile.split_k > 1):
                        barrier = ptx.mapa(received, owner)
                        store_async(target.subview(first + eight), pair, barrier)
                    else:
                        vector = Vector.from_elements(pair, Float32)
                        target.store(vector, first + eight, alignment=8)

    def wait(self, received: Array | None) -> None:
        """Wait until all partial sums have arrived; called by the multiplying warpgroups."""
        tile = self.tile
        if tile.split_k > 1:
            wait(received, Int32(0), CLUSTER)
        else:
            ptx.barrier_cta_sync(BARRIER, thread_count=tile.warpgroups * WARPGROUP)

    def added(self, parts: Array, product: int, row: Int32, token: Int32) -> Float32:
        """Sum of an element's partial sums, in an order independent of the order of arrival."""
        total = Float32(0.0)
        for part in range(self.tile.parts):
            total = total + parts.load(self._place(Int32(part), product, row) + token)
        return total

    def _place(self, part: Int32, product: int, row: Int32) -> Int32:
        tile = self.tile
        return ((part * tile.weights + product) * tile.split_rows + row) * tile.part_pitch
