"""Split K: reduction of partial sums between the CTAs of a cluster."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Float32, Int32, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.device.mbarrier import CLUSTER, wait
from nvfp4_kernels.gemm.sm100.tile import EPILOGUE_WARPS, Tile
from nvfp4_kernels.sm100.limits import CTA_ROWS, WARP_ROWS
from nvfp4_kernels.sm100.tensor_memory import tensor_pointer


@dataclass(frozen=True)
class Partials:
    """Partial sums in shared memory, and their barriers.

    Attributes:
        sums: float32 [from, product, column / width, row, width] of the columns that this CTA
            finishes; the part of its own stays in tensor memory.
        partials_full, partials_empty: mbarriers of one warp: all partial sums are here;
            they have been added up.
    """

    sums: Array
    partials_full: Array
    partials_empty: Array


@dataclass(frozen=True)
class SplitK:
    """Reduction in which every CTA of the cluster finishes its share of the columns.

    Each warp exchanges with the same warp of the other CTAs. A CTA sends and never fetches, and
    waits for all that is sent to it, data and arrivals, so that it may go whenever it is done.

    | barrier | arrivals | by |
    |---|---|---|
    | ``partials_full``, per warp | 32 per other CTA | every thread that has sent its values here |
    | ``partials_empty``, per warp | 1 per other CTA | each that has added up what came from here |
    """

    tile: Tile

    @property
    def width(self) -> int:
        """Columns that a thread moves at a time, up to 16 bytes."""
        return min(4, self.tile.split_columns)

    @property
    def arrivals(self) -> tuple[int, int]:
        """Arrive counts of ``partials_full`` and ``partials_empty``."""
        others = self.tile.split_k - 1
        return 32 * others, others

    @cute.jit
    def init_barriers(self, partials: Partials, lane: Int32) -> None:
        """Initialise the barriers of all warps, which peers signal; one warp, whole."""
        full, empty = self.arrivals
        if lane < EPILOGUE_WARPS:
            ptx.mbarrier_init(partials.partials_full.subview(lane), full)
            ptx.mbarrier_init(partials.partials_empty.subview(lane), empty)
        ptx.fence_mbarrier_init()
        ptx.bar_warp_sync(cute.arch.FULL_MASK)

    @cute.jit
    def exchange(
        self, partials: Partials, source: Int32, rank: Int32, index: Int32, warp: Int32, lane: Int32
    ) -> None:
        """Send the accumulators at ``source`` to those who finish them; wait for this CTA's."""
        tile, width = self.tile, self.width
        wait(partials.partials_empty, index - 1, CLUSTER)
        for distance in cutlass.range_constexpr(1, tile.split_k):
            owner = (rank + distance) % tile.split_k
            sums = ptx.mapa(partials.sums, owner)
            for product in cutlass.range_constexpr(tile.weights):
                values = self.load(source, product, owner * tile.split_columns, tile.split_columns)
                for column in cutlass.range_constexpr(0, tile.split_columns, width):
                    coord = self._place(rank, product, column, warp, lane)
                    sums.store(values[column : column + width], coord, alignment=4 * width)
            partials_full = ptx.mapa(partials.partials_full, owner)
            ptx.mbarrier_arrive(partials_full, scope=ptx.MemScope.CLUSTER)
        wait(partials.partials_full, index, CLUSTER)

    def load(self, source: Int32, product: int, column: Int32 | int, count: int) -> Vector:
        """Load ``count`` columns of one product's accumulator at ``source``."""
        values = ptx.tcgen05_ld(
            ptx.Tcgen05LdStShape.SHAPE_32X32B,
            tensor_pointer(source + product * self.tile.columns + column),
            num=count,
        )
        ptx.tcgen05_wait(ptx.Tcgen05Wait.LOAD)
        return values

    def added(
        self,
        partials: Partials,
        source: Int32,
        rank: Int32,
        product: int,
        columns: range,
        warp: Int32,
        lane: Int32,
    ) -> Vector:
        """Sums of this CTA's columns: its own part, then those of the others.

        Always in the same order, whoever came first.
        """
        tile, width = self.tile, self.width
        total = self.load(source, product, rank * tile.split_columns + columns.start, len(columns))
        for distance in range(1, tile.split_k):
            sender = (rank + distance) % tile.split_k
            received: list[Float32] = []
            for column in range(columns.start, columns.stop, width):
                coord = self._place(sender, product, column, warp, lane)
                received += partials.sums.load(coord, width, alignment=4 * width).to_elements()
            total = total + Vector.from_elements(tuple(received), Float32)
        return total

    @cute.jit
    def release(self, partials: Partials, rank: Int32, lane: Int32, last: Boolean) -> None:
        """Release this CTA's partial sums: the others may send those of the next tile.

        Not after the ``last`` tile: the others may have gone.
        """
        ptx.bar_warp_sync(cute.arch.FULL_MASK)
        if not last and lane < self.tile.split_k and lane != rank:
            ptx.mbarrier_arrive(ptx.mapa(partials.partials_empty, lane), scope=ptx.MemScope.CLUSTER)

    def _place(self, source: Int32, product: int, column: int, warp: Int32, lane: Int32) -> Int32:
        """Offset of a thread's values: lanes side by side, free of bank conflicts both ways."""
        tile, width = self.tile, self.width
        first = (source * tile.weights + product) * tile.split_columns + column
        return first * CTA_ROWS + (warp * WARP_ROWS + lane) * width
