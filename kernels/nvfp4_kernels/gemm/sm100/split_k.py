"""Split-K: reduction of partial sums between the CTAs of a cluster."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Float32, Int32, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.device.mbarrier import CLUSTER, store_async, wait
from nvfp4_kernels.gemm.sm100.tile import EPILOGUE_WARPS, Tile
from nvfp4_kernels.sm100.limits import CTA_ROWS, WARP_ROWS
from nvfp4_kernels.sm100.tensor_memory import tensor_pointer

_SENT_TO, _SENT_COLUMNS = 4, 32  # CTAs, and columns for them, that a thread holds at a time


@dataclass(frozen=True)
class Partials:
    """Partial sums in shared memory, and the mbarriers that guard them.

    Attributes:
        sums: float32 [sender, product, column / width, row, width], the peers' partial sums of the
            columns that this CTA finishes; the CTA's own partial sum stays in tensor memory.
        partials_full, partials_empty: mbarriers, one per warp: the peers' partial sums have
            arrived; the peers have added this CTA's.
    """

    sums: Array
    partials_full: Array
    partials_empty: Array


@dataclass(frozen=True)
class SplitK:
    """Reduction in which every CTA of the cluster finishes a share of the columns.

    Each warp exchanges with the same warp of the other CTAs. A CTA only pushes, never pulls, and
    waits for all data and arrivals sent to it, so that it may exit as soon as it is done.

    | barrier | arrive count | arrivals by |
    |---|---|---|
    | ``partials_full``, per warp | 1, and bytes | this CTA, before peers may send; ``st.async`` |
    | ``partials_empty``, per warp | 1 per other CTA | each CTA that has added this CTA's values |

    An arrival with release semantics at cluster scope costs a fence of the whole device, twice as
    long as the exchange itself on an H100; ``st.async`` needs none.
    """

    tile: Tile

    @property
    def width(self) -> int:
        """Number of columns that a thread moves at a time, up to 16 bytes."""
        return min(4, self.tile.split_columns)

    @property
    def arrivals(self) -> tuple[int, int]:
        """Arrive counts of ``partials_full`` and ``partials_empty``."""
        return 1, self.tile.split_k - 1

    @property
    def bytes_received(self) -> int:
        """Bytes that a warp receives per tile."""
        tile = self.tile
        return 4 * 32 * (tile.split_k - 1) * tile.weights * tile.split_columns

    def init_barriers(self, partials: Partials) -> None:
        """Initialise the barriers of all warps; called by the thread that initialises the others.

        Peers may signal once the thread has passed ``Lifetime.cluster_arrive``.
        """
        full, empty = self.arrivals
        for warp in range(EPILOGUE_WARPS):
            ptx.mbarrier_init(partials.partials_full.subview(warp), full)
            ptx.mbarrier_init(partials.partials_empty.subview(warp), empty)

    def expect_first(self, partials: Partials) -> None:
        """Expect the first tile's partial sums in all warps; called by one thread."""
        for warp in range(EPILOGUE_WARPS):
            barrier = partials.partials_full.subview(warp)
            ptx.mbarrier_arrive_expect_tx(barrier, self.bytes_received)

    @cute.jit
    def exchange(
        self, partials: Partials, source: Int32, rank: Int32, index: Int32, warp: Int32, lane: Int32
    ) -> None:
        """Send this warp's accumulators at ``source`` to the CTAs that finish the columns.

        ``source``: tensor memory address; ``index``: index of the tile among this CTA's tiles.
        """
        tile = self.tile
        wait(partials.partials_empty, index - 1, CLUSTER)
        # Columns for several CTAs are loaded together, as far as registers allow.
        columns = tile.weights * tile.split_columns
        together = min(_SENT_TO, max(1, _SENT_COLUMNS // columns))
        for first in cutlass.range_constexpr(1, tile.split_k, together):
            distances = range(first, min(first + together, tile.split_k))
            owners = [(rank + distance) % tile.split_k for distance in distances]
            parts = [
                [
                    self._load(source, product, owner * tile.split_columns, tile.split_columns)
                    for product in range(tile.weights)
                ]
                for owner in owners
            ]
            ptx.tcgen05_wait(ptx.Tcgen05Wait.LOAD)
            for owner, products in zip(owners, parts, strict=True):
                self._send(partials, products, owner, rank, warp, lane)

    def _send(
        self,
        partials: Partials,
        products: list[Vector],
        owner: Int32,
        rank: Int32,
        warp: Int32,
        lane: Int32,
    ) -> None:
        """Send the columns that CTA ``owner`` finishes; its barrier counts their bytes."""
        sums, width = ptx.mapa(partials.sums, owner), self.width
        partials_full = ptx.mapa(partials.partials_full, owner)
        for product, vector in enumerate(products):
            values = vector.to_elements()
            for column in range(0, self.tile.split_columns, width):
                place = sums.subview(self._place(rank, product, column, warp, lane))
                store_async(place, values[column : column + width], partials_full)

    def _load(self, source: Int32, product: int, column: Int32 | int, count: int) -> Vector:
        """Load ``count`` columns of a product's accumulator at ``source``; the caller must wait."""
        return ptx.tcgen05_ld(
            ptx.Tcgen05LdStShape.SHAPE_32X32B,
            tensor_pointer(source + product * self.tile.columns + column),
            num=count,
        )

    def addends(
        self,
        partials: Partials,
        source: Int32,
        rank: Int32,
        columns: range,
        warp: Int32,
        lane: Int32,
        awaited: Int32 | None,
        added: bool,
    ) -> list[list[Vector]]:
        """Load the addends of every product: this CTA's partial sum first, then the peers'.

        The order is fixed, independent of the order of arrival. ``columns``: range within the
        columns that this CTA finishes. ``awaited``: index of the tile whose partial sums are
        waited for, or None. ``added``: whether to return only the sums, added in this order.
        """
        tile, width = self.tile, self.width
        first, products = rank * tile.split_columns + columns.start, range(tile.weights)
        own = [self._load(source, product, first, len(columns)) for product in products]
        ptx.tcgen05_wait(ptx.Tcgen05Wait.LOAD)
        if awaited is not None:
            wait(partials.partials_full, awaited, CLUSTER)

        def received(product: int, sender: Int32) -> Vector:
            values: list[Float32] = []
            for column in range(columns.start, columns.stop, width):
                coord = self._place(sender, product, column, warp, lane)
                values += partials.sums.load(coord, width, alignment=4 * width).to_elements()
            return Vector.from_elements(tuple(values), Float32)

        senders = [(rank + distance) % tile.split_k for distance in range(1, tile.split_k)]
        found = []
        for product in products:
            parts = [own[product], *(received(product, sender) for sender in senders)]
            found.append([sum(parts[1:], parts[0])] if added else parts)
        return found

    @cute.jit
    def release(self, partials: Partials, rank: Int32, lane: Int32, more: Boolean) -> None:
        """Expect the next tile's partial sums, and release ``Partials`` for the peers to send them.

        Without ``more`` tiles no peer waits for the release, and peers may have exited.
        """
        if more:
            if ptx.elect_sync():
                ptx.mbarrier_arrive_expect_tx(partials.partials_full, self.bytes_received)
            ptx.bar_warp_sync(cute.arch.FULL_MASK)
            if lane < self.tile.split_k and lane != rank:
                partials_empty = ptx.mapa(partials.partials_empty, lane)
                ptx.mbarrier_arrive(partials_empty, scope=ptx.MemScope.CLUSTER)

    def _place(self, source: Int32, product: int, column: int, warp: Int32, lane: Int32) -> Int32:
        """Offset of a thread's values in ``Partials.sums``.

        Values of neighbouring lanes are contiguous: neither stores nor loads have bank conflicts.
        """
        tile, width = self.tile, self.width
        first = (source * tile.weights + product) * tile.split_columns + column
        return first * CTA_ROWS + (warp * WARP_ROWS + lane) * width
