"""Load warp: TMA copies of key and value tiles into a ring that both share."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Int32, Uint32, Vector
from cutlass.experimental import primitives as ptx
from cutlass.experimental.cuda import TensorMap

from nvfp4_kernels.attention.sm100.barriers import Barriers
from nvfp4_kernels.attention.sm100.rotating import NewKeys
from nvfp4_kernels.attention.sm100.rows import load_index
from nvfp4_kernels.attention.sm100.scheduler import WorkTile
from nvfp4_kernels.attention.sm100.tile import KEYS, AttentionTile, Variant
from nvfp4_kernels.device.mbarrier import wait
from nvfp4_kernels.sm100.limits import WARP_ROWS

PREFETCH = 3  # key tiles whose positions are loaded before their copies

# Coordinates of a lane's part of a key tile: a number for a box of rows, a list for a gather.
Coordinates = Any


@dataclass(frozen=True)
class Source:
    """Keys and values in global memory, and the ring in shared memory.

    Attributes:
        key_map, value_map: tensor maps; a box has one chunk of ``box_rows`` rows, or of one row
            if indexed.
        table: int32 [sequences, table_stride], pages; paged and indexed layouts only.
        table_stride: elements between rows of the table.
        ring: stages of [chunk, row, chunk bytes].
        rotation: ``RotationArguments``; used only if the variant has a rotation.
        k_scale, v_scale: pointers to the scales of an E4M3 cache, for new keys and values.
    """

    key_map: TensorMap
    value_map: TensorMap
    table: cute.Pointer
    table_stride: Int32
    ring: Array
    rotation: Any = None
    k_scale: Any = None
    v_scale: Any = None


@dataclass(frozen=True)
class TmaLoader:
    """Role of the load warp; each lane copies chunks of one box of rows, which lies in one page.

    Tiles are loaded in the order in which the MMA warp uses them. Pages are looked up one tile
    ahead of the copies, and positions of keys two tiles ahead.
    """

    tile: AttentionTile
    variant: Variant

    @cute.jit
    def run(self, source: Source, barriers: Barriers, work: WorkTile) -> None:
        """Load all key and value tiles of a work tile."""
        tile = self.tile
        leader = ptx.elect_sync()
        tiles, keys = work.max_tiles(), source.key_map
        count = 2 * work.before.kv_tiles  # keys and values
        positions = [self._positions(source, work, Int32(n)) for n in range(PREFETCH)]
        table = self._page_table(source, work)
        current, following = (self._coordinates(work, table, each) for each in positions[:2])
        prefetched = positions[2]
        if cutlass.const_expr(tile.qk_before_pv):
            if tiles > 0:
                self._load_tile(source, keys, barriers, work, Int32(0), count, current, leader)
                count += 1
        for index in cutlass.range(tiles, unroll=1):
            after = self._coordinates(work, table, prefetched)
            prefetched = self._positions(source, work, index + PREFETCH)
            if cutlass.const_expr(tile.qk_before_pv):
                if index + 1 < tiles:
                    self._load_tile(
                        source, keys, barriers, work, index + 1, count, following, leader
                    )
                    count += 1
            else:
                self._load_tile(source, keys, barriers, work, index, count, current, leader)
                count += 1
            self._load_values(source, barriers, work, index, count, current, leader)
            count += 1
            current, following = following, after

    @cute.jit
    def finish(self, barriers: Barriers, tiles: Int32) -> None:
        """Let the next kernel start; then drain the ring: wait for the last release of every stage.

        Args:
            barriers: mbarriers of the CTA.
            tiles: number of key tiles loaded.
        """
        tile, count = self.tile, 2 * tiles
        if cutlass.const_expr(self.variant.rotation is not None):
            # Not earlier: a dependent kernel may assume that all kernels before this one have
            # ended.
            ptx.griddepcontrol(ptx.GridDepAction.WAIT)
        # The next kernel's loads now compete with no loads of this CTA.
        ptx.griddepcontrol(ptx.GridDepAction.LAUNCH_DEPENDENTS)
        for last in cutlass.range_constexpr(tile.stages):
            number = count + last
            wait(barriers.kv_empty.subview(number % tile.stages), number // tile.stages - 1)

    def _page_table(self, source: Source, work: WorkTile) -> Array:
        """Row of the block table for this CTA's sequence."""
        entry = work.batch.to(cutlass.Int64) * source.table_stride
        return Array(source.table, shape=(1,)).subview(entry)

    @cute.jit
    def _positions(self, source: Source, work: WorkTile, index: Int32) -> Coordinates:
        """First key of this lane's box of the ``index``-th key tile; −1 if no query sees the box.

        If paged, −1 becomes page −1, outside the tensor map: TMA fills the box with zeros.
        """
        variant = self.variant
        box = cute.arch.lane_idx() % variant.boxes
        key = (work.first_tile + index) * KEYS + box * variant.box_rows
        oldest = Int32(0)
        if cutlass.const_expr(variant.window):
            oldest = work.position + work.first_row // work.group - work.window + 1
        seen = (key < work.keys) & (key + variant.box_rows > oldest) & (index < work.max_tiles())
        return cutlass.select_(seen, key, Int32(-1))

    @cute.jit
    def _coordinates(self, work: WorkTile, table: Array, key: Coordinates) -> Coordinates:
        """Page, or sequence if dense, of the box of key ``key``: the last coordinate of a copy."""
        variant = self.variant
        page = work.batch if cutlass.const_expr(variant.layout == "dense") else Int32(0)
        if cutlass.const_expr(variant.layout == "paged"):
            page = load_index(table, key // variant.page_size, key >= 0)
        return page

    @cute.jit
    def _load_tile(
        self,
        source: Source,
        tensor_map: TensorMap,
        barriers: Barriers,
        work: WorkTile,
        index: Int32,
        count: Int32,
        coordinates: Coordinates,
        leader: Boolean,
    ) -> None:
        """Load the ``index``-th key tile as the ``count``-th tile of the ring.

        With rotation, new keys are stored before the first tile that contains new keys is loaded.
        """
        if cutlass.const_expr(self.variant.rotation is not None):
            new_keys = NewKeys(self.variant)
            if index == new_keys.first_tile(work):
                ptx.griddepcontrol(ptx.GridDepAction.WAIT)
                new_keys.run(source.rotation, source.k_scale, source.v_scale, work)
        stage = count % self.tile.stages
        wait(barriers.kv_empty.subview(stage), count // self.tile.stages - 1)
        full = barriers.kv_full.subview(stage)
        self._issue_copies(source, tensor_map, work, index, stage, coordinates, full, leader)

    @cute.jit
    def _load_values(
        self,
        source: Source,
        barriers: Barriers,
        work: WorkTile,
        index: Int32,
        count: Int32,
        coordinates: Coordinates,
        leader: Boolean,
    ) -> None:
        """Load values of a key tile; zero rows past the last key, since P = 0 times NaN is NaN."""
        stage = count % self.tile.stages
        wait(barriers.kv_empty.subview(stage), count // self.tile.stages - 1)
        full = barriers.kv_full.subview(stage)
        values = source.value_map
        rows = work.keys - (work.first_tile + index) * KEYS
        if rows < KEYS:
            tail_full = barriers.tail_full
            self._issue_copies(source, values, work, index, stage, coordinates, tail_full, leader)
            wait(tail_full, work.before.tail_tiles)
            self._zero_tail(source, stage, rows)
            ptx.fence_proxy(ptx.Proxy.ASYNC_SHARED, space=ptx.SharedSpace.shared_cta)
            ptx.bar_warp_sync(cute.arch.FULL_MASK)
            if leader:
                ptx.mbarrier_arrive(full)
        else:
            self._issue_copies(source, values, work, index, stage, coordinates, full, leader)

    @cute.jit
    def _issue_copies(
        self,
        source: Source,
        tensor_map: TensorMap,
        work: WorkTile,
        index: Int32,
        stage: Int32,
        coordinates: Coordinates,
        barrier: Array,
        leader: Boolean,
    ) -> None:
        """Issue the copies of one tile, a box per lane at a time."""
        tile, variant = self.tile, self.variant
        if leader:
            ptx.mbarrier_arrive_expect_tx(barrier, tile.stage_bytes)
        lane = cute.arch.lane_idx()
        row = work.first_key + (work.first_tile + index) * KEYS
        if cutlass.const_expr(variant.layout == "paged"):
            row = row % variant.page_size if variant.page_size > KEYS else Int32(0)
        # A lane always has the same box of rows: it holds one page.
        box, chunks_at_once = lane % variant.boxes, WARP_ROWS // variant.boxes
        for first in cutlass.range_constexpr(0, tile.chunks, chunks_at_once):
            chunk = first + lane // variant.boxes
            offset = (chunk * KEYS + box * variant.box_rows) * tile.chunk_bytes
            if chunk < tile.chunks:
                ptx.cp_async_bulk_tensor_shared_cluster_global(
                    source.ring.subview(stage * tile.stage_bytes + offset),
                    tensor_map.get_ptr(),
                    [chunk * tile.chunk_elements, row, work.kv_head, coordinates],
                    barrier,
                    [],
                )

    @cute.jit
    def _zero_tail(self, source: Source, stage: Int32, rows: Int32) -> None:
        """Zero the tile from row ``rows`` to the end of the box; TMA zeroed boxes without a key."""
        tile, box_rows = self.tile, self.variant.box_rows
        zeros = Vector.from_elements((0,) * 4, Uint32).bitcast(cutlass.Uint8)
        vectors = tile.chunk_bytes // 16
        lane = cute.arch.lane_idx()
        end = cute.ceil_div(rows, box_rows) * box_rows
        for row in cutlass.range(rows, end, unroll=1):
            if lane < tile.row_bytes // 16:
                chunk, vector = lane // vectors, lane % vectors
                offset = (chunk * KEYS + row) * tile.chunk_bytes + vector * 16
                source.ring.store(zeros, stage * tile.stage_bytes + offset, alignment=16)
