"""The load warp: brings the queries, then key tiles into a ring."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Int32
from cutlass.experimental import primitives as ptx
from cutlass.experimental.cuda import TensorMap

from nvfp4_kernels.device.mbarrier import wait
from nvfp4_kernels.indexer.sm100.barriers import Barriers
from nvfp4_kernels.indexer.sm100.operands import PageFinder, Pages
from nvfp4_kernels.indexer.sm100.scheduler import Work
from nvfp4_kernels.indexer.sm100.tile import KEYS, ScoreTile
from nvfp4_kernels.indexer.sm100.variant import Variant
from nvfp4_kernels.sm100.limits import WARP_ROWS


@dataclass(frozen=True)
class Operands:
    """Data in shared memory, and where it comes from.

    Attributes:
        query_map, key_map: tensor maps.
        queries: [chunk, column, chunk bytes].
        keys: ring of stages, [chunk, key, chunk bytes] each.
    """

    query_map: TensorMap
    key_map: TensorMap
    queries: Array
    keys: Array


@dataclass(frozen=True)
class Loader:
    """Role of one warp: each lane copies boxes of one page."""

    tile: ScoreTile
    variant: Variant

    @cute.jit
    def run(self, operands: Operands, pages: Pages, barriers: Barriers, work: Work) -> None:
        """All tiles; then waits until no commit will arrive here any more."""
        tile, finder = self.tile, PageFinder(self.variant)
        leader = ptx.elect_sync()
        if work.tiles > 0:
            self._queries(operands, barriers, work, leader)
        looked_up, per = finder.look_up(pages, work, Int32(0)), finder.tiles
        for batch in cutlass.range(cute.ceil_div(work.tiles, per), unroll=1):
            following = finder.look_up(pages, work, batch + 1)
            first = batch * per
            for number in cutlass.range(cutlass.min(per, work.tiles - first), unroll=1):
                page = finder.of_row(looked_up, number, self._box * self.variant.box_rows)
                stage, turn = (first + number) % tile.stages, (first + number) // tile.stages
                wait(barriers.empty.subview(stage), turn - 1)
                self._keys(operands, barriers, work, first + number, stage, page, leader)
            looked_up = following
        # From here on nothing is loaded that the next kernel would have to share bandwidth with.
        ptx.griddepcontrol(ptx.GridDepAction.LAUNCH_DEPENDENTS)
        for last in cutlass.range_constexpr(tile.stages):
            number = work.tiles + last
            wait(barriers.empty.subview(number % tile.stages), number // tile.stages - 1)

    @property
    def _box(self) -> Int32:
        """Which box of keys a lane copies; always the same."""
        return cute.arch.lane_idx() % self.variant.boxes

    @cute.jit
    def _queries(self, operands: Operands, barriers: Barriers, work: Work, leader: Boolean) -> None:
        """Rows of other sequences come along behind the last query; nobody reads their columns."""
        tile = self.tile
        if leader:
            ptx.mbarrier_arrive_expect_tx(barriers.asked, tile.query_bytes)
            for chunk in cutlass.range_constexpr(tile.chunks):
                ptx.cp_async_bulk_tensor_shared_cluster_global(
                    operands.queries.subview(chunk * tile.columns * tile.chunk_bytes),
                    operands.query_map.get_ptr(),
                    [chunk * tile.chunk_bytes, 0, work.first_query],
                    barriers.asked,
                    [],
                )

    @cute.jit
    def _keys(
        self,
        operands: Operands,
        barriers: Barriers,
        work: Work,
        index: Int32,
        stage: Int32,
        page: Int32,
        leader: Boolean,
    ) -> None:
        """One tile, a box per lane at a time."""
        tile, variant = self.tile, self.variant
        full = barriers.full.subview(stage)
        if leader:
            ptx.mbarrier_arrive_expect_tx(full, tile.key_bytes)
        row = (work.first_tile + index) * KEYS
        if cutlass.const_expr(variant.paged):
            row = row % variant.page_size if variant.page_size > KEYS else Int32(0)
        at_once = WARP_ROWS // variant.boxes
        for first in cutlass.range_constexpr(0, tile.chunks, at_once):
            chunk = first + cute.arch.lane_idx() // variant.boxes
            offset = (chunk * KEYS + self._box * variant.box_rows) * tile.chunk_bytes
            if chunk < tile.chunks:
                ptx.cp_async_bulk_tensor_shared_cluster_global(
                    operands.keys.subview(stage * tile.key_bytes + offset),
                    operands.key_map.get_ptr(),
                    [chunk * tile.chunk_bytes, row, page],
                    full,
                    [],
                )
