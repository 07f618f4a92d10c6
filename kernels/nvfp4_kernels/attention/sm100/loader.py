"""The load warp: brings key and value tiles into a ring that both share."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Int32, Uint32, Vector
from cutlass.experimental import primitives as ptx
from cutlass.experimental.cuda import TensorMap

from nvfp4_kernels.attention.sm100.barriers import Barriers
from nvfp4_kernels.attention.sm100.rows import load_index
from nvfp4_kernels.attention.sm100.scheduler import Work
from nvfp4_kernels.attention.sm100.tile import KEYS, AttentionTile, Variant
from nvfp4_kernels.device.mbarrier import wait
from nvfp4_kernels.sm100.limits import WARP_ROWS

AHEAD = 3  # tiles

# What is known of a lane's part of a tile: where it begins, among keys or in memory.
Place = Any


@dataclass(frozen=True)
class Source:
    """Keys and values in global memory, and their ring.

    Attributes:
        key_map, value_map: their boxes are some rows of one chunk.
        table: int32 [sequences, table_stride], pages; of paged and indexed layouts alone.
        table_stride: entries.
        ring: of stages, [chunk, row, chunk bytes] each.
    """

    key_map: TensorMap
    value_map: TensorMap
    table: cute.Pointer
    table_stride: Int32
    ring: Array


@dataclass(frozen=True)
class Loader:
    """Role of one warp: each lane copies boxes of one page.

    Tiles come in the order in which the MMA warp takes them. Where their rows lie is looked up a
    tile before they are copied, and what that is looked up by is asked for another tile before.
    """

    tile: AttentionTile
    variant: Variant

    @cute.jit
    def run(self, source: Source, barriers: Barriers, work: Work) -> None:
        """All tiles; then waits until no commit will arrive here any more."""
        tile = self.tile
        leader = ptx.elect_sync()
        tiles, keys = work.most_tiles(), source.key_map
        count = Int32(0)
        asked = [self._ask(source, work, Int32(n)) for n in range(AHEAD)]
        table = self._table(source, work)
        place, following = (self._find(work, table, each) for each in asked[:2])
        coming = asked[2]
        if cutlass.const_expr(tile.early):
            if tiles > 0:
                self._copy(source, keys, barriers, work, Int32(0), count, place, leader)
                count += 1
        for index in cutlass.range(tiles, unroll=1):
            ahead = self._find(work, table, coming)
            coming = self._ask(source, work, index + AHEAD)
            if cutlass.const_expr(tile.early):
                if index + 1 < tiles:
                    self._copy(source, keys, barriers, work, index + 1, count, following, leader)
                    count += 1
            else:
                self._copy(source, keys, barriers, work, index, count, place, leader)
                count += 1
            self._values(source, barriers, work, index, count, place, leader)
            count += 1
            place, following = following, ahead
        # From here on nothing is loaded that the next kernel would have to share bandwidth with.
        ptx.griddepcontrol(ptx.GridDepAction.LAUNCH_DEPENDENTS)
        for last in cutlass.range_constexpr(tile.stages):
            number = count + last
            wait(barriers.empty.subview(number % tile.stages), number // tile.stages - 1)

    def _table(self, source: Source, work: Work) -> Array:
        """The pages of this CTA's sequence."""
        entry = work.batch.to(cutlass.Int64) * source.table_stride
        return Array(source.table, shape=(1,)).subview(entry)

    @cute.jit
    def _ask(self, source: Source, work: Work, index: Int32) -> Place:
        """The first key of this lane's box of the ``index``-th key tile; −1 if nobody sees any.

        Such boxes are not read, whatever the table says: they come as zeros.
        """
        variant = self.variant
        box = cute.arch.lane_idx() % variant.boxes
        key = (work.first_tile + index) * KEYS + box * variant.box_rows
        oldest = Int32(0)
        if cutlass.const_expr(variant.window):
            oldest = work.position + work.first_row // work.group - work.window + 1
        seen = (key < work.keys) & (key + variant.box_rows > oldest) & (index < work.most_tiles())
        return cutlass.select_(seen, key, Int32(-1))

    @cute.jit
    def _find(self, work: Work, table: Array, key: Place) -> Place:
        """Where the box of that key lies along the last dimension."""
        variant = self.variant
        page = work.batch if cutlass.const_expr(variant.layout == "dense") else Int32(0)
        if cutlass.const_expr(variant.layout == "paged"):
            page = load_index(table, key // variant.page_size, key >= 0)
        return page

    @cute.jit
    def _copy(
        self,
        source: Source,
        tensor_map: TensorMap,
        barriers: Barriers,
        work: Work,
        index: Int32,
        count: Int32,
        place: Place,
        leader: Boolean,
    ) -> None:
        """The ``count``-th tile of the ring, as it comes."""
        stage = count % self.tile.stages
        wait(barriers.empty.subview(stage), count // self.tile.stages - 1)
        full = barriers.full.subview(stage)
        self._bring(source, tensor_map, work, index, stage, place, full, leader)

    @cute.jit
    def _values(
        self,
        source: Source,
        barriers: Barriers,
        work: Work,
        index: Int32,
        count: Int32,
        place: Place,
        leader: Boolean,
    ) -> None:
        """Clears what follows the last value: 0 times what lies there need not be 0."""
        stage = count % self.tile.stages
        wait(barriers.empty.subview(stage), count // self.tile.stages - 1)
        full = barriers.full.subview(stage)
        rows = work.keys - (work.first_tile + index) * KEYS
        if rows < KEYS:
            clean = barriers.clean
            self._bring(source, source.value_map, work, index, stage, place, clean, leader)
            wait(clean, Int32(0))
            self._clear(source, stage, rows)
            ptx.fence_proxy(ptx.Proxy.ASYNC_SHARED, space=ptx.SharedSpace.shared_cta)
            ptx.bar_warp_sync(cute.arch.FULL_MASK)
            if leader:
                ptx.mbarrier_arrive(full)
        else:
            self._bring(source, source.value_map, work, index, stage, place, full, leader)

    @cute.jit
    def _bring(
        self,
        source: Source,
        tensor_map: TensorMap,
        work: Work,
        index: Int32,
        stage: Int32,
        place: Place,
        barrier: Array,
        leader: Boolean,
    ) -> None:
        """One tile, a box per lane at a time."""
        tile, variant = self.tile, self.variant
        if leader:
            ptx.mbarrier_arrive_expect_tx(barrier, tile.stage_bytes)
        lane = cute.arch.lane_idx()
        row = work.first_key + (work.first_tile + index) * KEYS
        if cutlass.const_expr(variant.layout == "paged"):
            row = row % variant.page_size if variant.page_size > KEYS else Int32(0)
        # A lane always has the same box of rows: it holds one page.
        box, at_once = lane % variant.boxes, WARP_ROWS // variant.boxes
        for first in cutlass.range_constexpr(0, tile.chunks, at_once):
            chunk = first + lane // variant.boxes
            offset = (chunk * KEYS + box * variant.box_rows) * tile.chunk_bytes
            if chunk < tile.chunks:
                ptx.cp_async_bulk_tensor_shared_cluster_global(
                    source.ring.subview(stage * tile.stage_bytes + offset),
                    tensor_map.get_ptr(),
                    [chunk * tile.chunk_elements, row, work.kv_head, place],
                    barrier,
                    [],
                )

    @cute.jit
    def _clear(self, source: Source, stage: Int32, rows: Int32) -> None:
        """Zeros from row ``rows`` on; boxes without a key have come as zeros."""
        tile, box_rows = self.tile, self.variant.box_rows
        zeros = Vector.from_elements((0,) * 4, Uint32).bitcast(cutlass.Uint8)
        pieces = tile.chunk_bytes // 16
        lane = cute.arch.lane_idx()
        end = cute.ceil_div(rows, box_rows) * box_rows
        for row in cutlass.range(rows, end, unroll=1):
            if lane < tile.row_bytes // 16:
                chunk, piece = lane // pieces, lane % pieces
                offset = (chunk * KEYS + row) * tile.chunk_bytes + piece * 16
                source.ring.store(zeros, stage * tile.stage_bytes + offset, alignment=16)
