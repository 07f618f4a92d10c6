"""Sort of a small batch, repeated in every CTA."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import AddressSpace, Array, Int32
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.moe.route.sort import (
    Batch,
    RoutingOut,
    Sorter,
    count,
    place_experts,
    prepare,
    row_of,
    sorter,
    write_slots,
    write_tiles,
)
from nvfp4_kernels.moe.route.tile import RouteTile, Sizes


@dataclass(frozen=True)
class CtaRoute:
    """Sort in one CTA's shared memory; only the last CTA writes the routing to global memory.

    Attributes:
        tile: threads of the CTA.
        sizes: experts, and rows of a tile.
        capacity: most rows.
    """

    tile: RouteTile
    sizes: Sizes
    capacity: int

    def allocate(self) -> Array:
        """Shared memory for the slot of each row."""
        return Array(Int32, self.capacity, space=AddressSpace.smem, alignment=4)

    @cute.jit
    def run(self, batch: Batch, out: RoutingOut, slots: Array) -> Int32:
        """Fill ``slots`` after preceding kernels; return tiles in use, 0 in the last CTA."""
        sort = sorter(self.tile, self.sizes)
        for at in range(sort.thread, self.capacity, self.tile.threads):
            slots.store(Int32(-1), at)
        prepare(sort, batch)
        ptx.griddepcontrol(ptx.GridDepAction.WAIT)
        experts, ranks = count(sort, batch)
        used = place_experts(sort)
        if cute.arch.block_idx()[0] == cute.arch.grid_dim()[0] - 1:
            write_slots(sort, batch, out, experts, ranks)
            write_tiles(sort, out, used)
            used = Int32(0)
        else:
            self._fill(sort, batch, slots, experts, ranks)
        ptx.barrier_cta_sync()
        return used

    @cute.jit
    def _fill(
        self, sort: Sorter, batch: Batch, slots: Array, experts: list[Int32], ranks: list[Int32]
    ) -> None:
        for step, (expert, rank) in enumerate(zip(experts, ranks, strict=True)):
            row = row_of(sort, expert, rank)
            if row >= 0:
                slots.store(sort.slot(batch, 0, step), row)
