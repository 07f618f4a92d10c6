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

Placed = list[tuple[Int32, tuple[Float32, ...]]]  # vectors, each with its place in partial sums


@dataclass(frozen=True)
class SplitK:
    """Reduction in which every CTA of the cluster finishes a share of the rows.

    The cluster synchronises once, when all CTAs have started. Partial sums are then sent by
    ``st.async``, which counts their bytes on the receiver's mbarrier: arrivals with release
    semantics at cluster scope would each cost a fence of the whole device, twice as long as the
    exchange itself on an H100. Partial sums of a CTA's own share stay in its shared memory. A CTA
    waits for every byte sent to it, so that it may exit as soon as it is done.

    A lane holds pairs of neighbouring tokens of a row, and the pairs of two times eight tokens are
    moved together if possible. Partial sums are therefore float32 [part of K, product, group of
    4 · ``width`` tokens, row of this CTA's share, quarter, ``width``], quarters of a row swapped so
    that neither writing nor reading has bank conflicts.
    """

    tile: Tile

    @property
    def width(self) -> int:
        """Number of tokens of a row that a lane moves at a time, up to 16 bytes."""
        return 4 if self.tile.tokens % 16 == 0 else 2

    @property
    def bytes_received(self) -> int:
        """Bytes of partial sums that a CTA receives from the others of the cluster."""
        tile = self.tile
        parts = tile.parts - tile.slices
        return 4 * parts * tile.weights * tile.split_rows * tile.tokens

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
        """Send a warpgroup's fragments to the CTAs that finish their rows, or keep its own."""
        tile = self.tile
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        lane = thread % 32
        part, team = rank * tile.slices + group % tile.slices, group // tile.slices
        self.wait_start()
        for half in cutlass.range_constexpr(2):
            first = cute.arch.make_warp_uniform(team * TILE + thread // 32 * 16 + 8 * half)
            row = first % tile.split_rows + lane // 4
            values = self._by_place(sums, half, part, row, lane % 4)
            if cutlass.const_expr(tile.split_k > 1):
                self._deliver(values, parts, received, first // tile.split_rows, rank)
            else:
                self._keep(values, parts)

    @cute.jit
    def _deliver(
        self, values: Placed, parts: Array, received: Array, owner: Int32, rank: Int32
    ) -> None:
        """Send values to the CTA ``owner``, or keep this CTA's own."""
        if owner == rank:
            self._keep(values, parts)
        else:
            target, barrier = ptx.mapa(parts, owner), ptx.mapa(received, owner)
            for place, vector in values:
                store_async(target.subview(place), vector, barrier)

    def _keep(self, values: Placed, parts: Array) -> None:
        for place, vector in values:
            parts.store(Vector.from_elements(vector, Float32), place, alignment=4 * self.width)

    def _by_place(
        self, sums: list[list[Float32]], half: int, part: Int32, row: Int32, quarter: Int32
    ) -> Placed:
        """Values of a lane's row, upper or lower ``half``, each vector with its place."""
        found: Placed = []
        for product in range(self.tile.weights):
            for first in range(0, self.tile.tokens, 4 * self.width):
                at = [first // 2 + 4 * eight + 2 * half for eight in range(self.width // 2)]
                vector = tuple(sums[product][each + c] for each in at for c in range(2))
                place = self._place(part, product, row, first // self.width + quarter)
                found.append((place, vector))
        return found

    def wait(self, received: Array | None) -> None:
        """Wait until all partial sums have arrived; called by the multiplying warpgroups."""
        tile = self.tile
        ptx.barrier_cta_sync(BARRIER, thread_count=tile.warpgroups * WARPGROUP)
        if tile.split_k > 1:
            wait(received, Int32(0), CLUSTER)

    def token(self, vector: Int32, index: int) -> Int32:
        """Token of an element of a row's ``vector``, which ``added`` returns."""
        group, quarter = vector // 4, vector % 4
        return group * (4 * self.width) + index // 2 * 8 + quarter * 2 + index % 2

    def added(self, parts: Array, product: int, row: Int32, vector: Int32) -> list[Float32]:
        """Sums of a vector's partial sums, in an order independent of the order of arrival."""
        totals = [Float32(0.0)] * self.width
        for part in range(self.tile.parts):
            place = self._place(Int32(part), product, row, vector)
            addends = parts.load(place, self.width, alignment=4 * self.width).to_elements()
            totals = [total + each for total, each in zip(totals, addends, strict=True)]
        return totals

    def _place(self, part: Int32, product: int, row: Int32, vector: Int32) -> Int32:
        """Offset of a row's ``vector`` in the partial sums."""
        tile, width = self.tile, self.width
        groups = tile.tokens // (4 * width)
        first = (part * tile.weights + product) * groups + vector // 4
        quarter = (vector % 4) ^ (row // (8 // width) % 4)
        return ((first * tile.split_rows + row) * 4 + quarter) * width
