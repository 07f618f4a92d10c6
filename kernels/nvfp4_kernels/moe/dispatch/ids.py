"""Source of a dispatch from ids, for small batches: a sort by expert, repeated in every CTA."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import AddressSpace, Array, Int32
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.device.arguments import example
from nvfp4_kernels.moe.dispatch.choose import SortTile
from nvfp4_kernels.moe.dispatch.tokens import Tokens
from nvfp4_kernels.moe.route.sort import (
    BATCH_TYPES,
    ROUTING_TYPES,
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
from nvfp4_kernels.moe.route.tile import Sizes


class IdsArguments(NamedTuple):
    """Ids to sort, and the routing to write; part of a launch's arguments.

    Attributes:
        batch: slots to sort.
        routing: result of the sort, written by the last CTA of the grid.
    """

    batch: Batch
    routing: RoutingOut


@dataclass(frozen=True)
class CtaRoute:
    """Sort in one CTA's shared memory; only the last CTA writes the routing to global memory.

    Attributes:
        tile: layout of the sort, and entries of the row-to-slot table.
        sizes: number of experts, and rows per tile.
    """

    tile: SortTile
    sizes: Sizes

    cluster = threads = None

    @property
    def tile_tokens(self) -> int:
        """Number of rows per token tile."""
        return self.sizes.tile_tokens

    def arguments(self) -> IdsArguments:
        """Example arguments of the source, for ``cute.compile``."""
        return example(IdsArguments, BATCH_TYPES | ROUTING_TYPES, 4)

    def place(self, source: IdsArguments, tokens: Tokens) -> tuple[Array, Callable[[], Int32]]:
        """Sort; return the slots of all rows, and a function for the number of tiles in use.

        The slots are in shared memory.
        """
        slots = Array(Int32, self.tile.capacity, space=AddressSpace.smem, alignment=4)
        used = self.run(source.batch, source.routing, slots)
        return slots, lambda: used

    def workers(self, ctas: Int32) -> Int32:
        """Number of CTAs that process rows: all but the last, which writes the routing."""
        return ctas - 1

    def finish(self) -> None:
        """Return at once: no peer reads this CTA's shared memory."""

    @cute.jit
    def run(self, batch: Batch, out: RoutingOut, slots: Array) -> Int32:
        """Wait for preceding kernels and fill ``slots``; return the number of tiles in use.

        The last CTA, which processes no rows, gets 0.
        """
        sort = sorter(self.tile.route, self.sizes)
        for at in range(sort.thread, self.tile.capacity, self.tile.route.threads):
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
