"""TMA warp: loads the queries once, then key tiles into a ring."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Int32
from cutlass.experimental import primitives as ptx
from cutlass.experimental.cuda import TensorMap

from nvfp4_kernels.device.mbarrier import wait
from nvfp4_kernels.indexer.sm100.barriers import Barriers
from nvfp4_kernels.indexer.sm100.operands import PageLookup, PageTable
from nvfp4_kernels.indexer.sm100.scheduler import TileScheduler
from nvfp4_kernels.indexer.sm100.tile import KEYS, ScoreTile
from nvfp4_kernels.indexer.sm100.variant import Variant
from nvfp4_kernels.sm100.limits import WARP_ROWS


@dataclass(frozen=True)
class TmaOperands:
    """Source and destination of the TMA copies.

    Attributes:
        query_map, key_map: tensor maps of queries and keys in global memory.
        queries: queries in shared memory, [chunk, column, chunk bytes].
        keys: ring of key tiles in shared memory, [chunk, key, chunk bytes] per stage.
    """

    query_map: TensorMap
    key_map: TensorMap
    queries: Array
    keys: Array


@dataclass(frozen=True)
class TmaLoader:
    """Role of the TMA warp; a lane copies chunks of the same box of keys in every key tile."""

    tile: ScoreTile
    variant: Variant

    @cute.jit
    def run(
        self,
        operands: TmaOperands,
        page_table: PageTable,
        barriers: Barriers,
        scheduler: TileScheduler,
    ) -> None:
        """Load queries and key tiles, then wait until all stages are empty.

        A CTA must not exit while commits can still arrive at its mbarriers.
        """
        tile, lookup = self.tile, PageLookup(self.variant)
        leader = ptx.elect_sync()
        if scheduler.num_tiles > 0:
            self._load_queries(operands, barriers, scheduler, leader)
        pages, per = lookup.run(page_table, scheduler, Int32(0)), lookup.tiles
        for batch in cutlass.range(cute.ceil_div(scheduler.num_tiles, per), unroll=1):
            next_pages = lookup.run(page_table, scheduler, batch + 1)
            first = batch * per
            for number in cutlass.range(cutlass.min(per, scheduler.num_tiles - first), unroll=1):
                page = lookup.page_of_row(pages, number, self._box * self.variant.box_rows)
                stage, phase = (first + number) % tile.stages, (first + number) // tile.stages
                wait(barriers.k_empty.subview(stage), phase - 1)
                self._load_keys(operands, barriers, scheduler, first + number, stage, page, leader)
            pages = next_pages
        # From here on this CTA loads nothing that would compete with the next kernel for bandwidth.
        ptx.griddepcontrol(ptx.GridDepAction.LAUNCH_DEPENDENTS)
        for last in cutlass.range_constexpr(tile.stages):
            number = scheduler.num_tiles + last
            wait(barriers.k_empty.subview(number % tile.stages), number // tile.stages - 1)

    @property
    def _box(self) -> Int32:
        """Index, in every key tile, of the box of keys that this lane copies."""
        return cute.arch.lane_idx() % self.variant.boxes

    @cute.jit
    def _load_queries(
        self, operands: TmaOperands, barriers: Barriers, scheduler: TileScheduler, leader: Boolean
    ) -> None:
        """Load the queries; rows past the last query fill columns that are never read."""
        tile = self.tile
        if leader:
            ptx.mbarrier_arrive_expect_tx(barriers.q_full, tile.query_bytes)
            for chunk in cutlass.range_constexpr(tile.chunks):
                ptx.cp_async_bulk_tensor_shared_cluster_global(
                    operands.queries.subview(chunk * tile.columns * tile.chunk_bytes),
                    operands.query_map.get_ptr(),
                    [chunk * tile.chunk_bytes, 0, scheduler.first_query],
                    barriers.q_full,
                    [],
                )

    @cute.jit
    def _load_keys(
        self,
        operands: TmaOperands,
        barriers: Barriers,
        scheduler: TileScheduler,
        index: Int32,
        stage: Int32,
        page: Int32,
        leader: Boolean,
    ) -> None:
        """Load the CTA's key tile ``index`` into ``stage``; each lane copies chunks of one box.

        ``page``: page of this lane's box.
        """
        tile, variant = self.tile, self.variant
        k_full = barriers.k_full.subview(stage)
        if leader:
            ptx.mbarrier_arrive_expect_tx(k_full, tile.key_bytes)
        row = (scheduler.first_tile + index) * KEYS
        if cutlass.const_expr(variant.paged):
            row = row % variant.page_size if variant.page_size > KEYS else Int32(0)
        chunks = WARP_ROWS // variant.boxes
        for first in cutlass.range_constexpr(0, tile.chunks, chunks):
            chunk = first + cute.arch.lane_idx() // variant.boxes
            offset = (chunk * KEYS + self._box * variant.box_rows) * tile.chunk_bytes
            if chunk < tile.chunks:
                ptx.cp_async_bulk_tensor_shared_cluster_global(
                    operands.keys.subview(stage * tile.key_bytes + offset),
                    operands.key_map.get_ptr(),
                    [chunk * tile.chunk_bytes, row, page],
                    k_full,
                    [],
                )
