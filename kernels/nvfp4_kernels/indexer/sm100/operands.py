"""Tensor maps of keys and queries, and lookup of keys' pages."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Array, Int32, Int64, Uint8
from cutlass.experimental.cuda import TensorMap

from nvfp4_kernels.indexer.sm100.scheduler import TileScheduler
from nvfp4_kernels.indexer.sm100.tile import KEYS, ScoreTile
from nvfp4_kernels.indexer.sm100.variant import Variant
from nvfp4_kernels.sm100.descriptors import TENSOR_MAP_SWIZZLES
from nvfp4_kernels.sm100.limits import WARP_ROWS
from nvfp4_kernels.sm100.tensor_maps import tensor_map


class PageTable(NamedTuple):
    """Pages of each sequence in global memory. Contiguous keys are a single page, of number 0.

    Attributes:
        table: int32 [sequences, table_stride], page numbers; null for contiguous keys.
        table_stride: entries from one sequence's row to the next.
        pages: number of pages, which also serves as the index of an absent page.
        stride: bytes from one page to the next.
        k_scales: scales of the first page's first key: block scales, or an FP8 key's float32 scale.
    """

    table: cute.Pointer
    table_stride: Int32
    pages: Int32
    stride: Int64
    k_scales: cute.Pointer


@dataclass(frozen=True)
class PageLookup:
    """Lookup of the pages of a CTA's keys, 32 boxes at a time, one per lane.

    A box is the unit of a TMA copy: keys of one page. Lanes exchange page numbers by warp shuffle,
    so that one lookup serves several key tiles; the lookup is issued while earlier tiles are
    loaded.
    """

    variant: Variant

    @property
    def tiles(self) -> int:
        """Number of key tiles per lookup."""
        return WARP_ROWS // self.variant.boxes

    @cute.jit
    def run(self, page_table: PageTable, scheduler: TileScheduler, batch: Int32) -> Int32:
        """Page number of this lane's box in the ``batch``-th lookup; 0 if keys are contiguous.

        If no query of the CTA sees the box, return ``page_table.pages``, which is out of range.
        """
        variant = self.variant
        page = Int32(0)
        if cutlass.const_expr(variant.paged):
            page = page_table.pages
            box = batch * WARP_ROWS + cute.arch.lane_idx()
            key = scheduler.first_tile * KEYS + box * variant.box_rows
            if key < scheduler.key_end and box < scheduler.num_tiles * variant.boxes:
                entry = (
                    scheduler.sequence.to(Int64) * page_table.table_stride
                    + key // variant.page_size
                )
                page = Array(page_table.table, shape=(1,)).load(entry)
        return page

    def page_of_row(self, pages: Int32, tile: Int32, row: Int32 | int) -> Int32:
        """Page number of key ``row`` of the lookup's ``tile``-th key tile; all lanes take part.

        ``pages``: this lane's page number from ``run``.
        """
        if not self.variant.paged:
            return pages
        lane = tile * self.variant.boxes + row // self.variant.box_rows
        return Int32(cute.arch.shuffle_sync(pages, lane))


def scale_address(
    variant: Variant, page_table: PageTable, page: Int32, key: Int32, scale_bytes: int
) -> Int64:
    """Address of a key's scales; some query of the CTA must see the key.

    ``scale_bytes``: bytes of scales per key.
    """
    start = Int64(page_table.k_scales.toint())
    if not variant.paged:
        return start + Int64(key) * scale_bytes
    return start + Int64(page) * page_table.stride + key % variant.page_size * scale_bytes


def key_map(
    tile: ScoreTile,
    variant: Variant,
    data: cute.Pointer,
    keys: Int32,
    page_table: PageTable,
    defective_below: Int32,
) -> TensorMap:
    """Tensor map of the keys: [row bytes, keys per page, pages]; out of bounds reads as zeros."""
    rows = Int32(variant.page_size) if variant.paged else keys
    return tensor_map(
        data.toint(),
        Uint8,
        [tile.row_bytes, rows, page_table.pages],
        [tile.row_bytes // 16, page_table.stride // 16],
        [tile.chunk_bytes, variant.box_rows, 1],
        defective_below,
        TENSOR_MAP_SWIZZLES[tile.chunk_bytes],
    )


def query_map(
    tile: ScoreTile, data: cute.Pointer, queries: Int32, defective_below: Int32
) -> TensorMap:
    """Tensor map of the queries: [row bytes, heads, queries]; padding heads read as zeros."""
    return tensor_map(
        data.toint(),
        Uint8,
        [tile.row_bytes, tile.num_heads, queries],
        [tile.row_bytes // 16, tile.num_heads * tile.row_bytes // 16],
        [tile.chunk_bytes, tile.head_columns, tile.queries],
        defective_below,
        TENSOR_MAP_SWIZZLES[tile.chunk_bytes],
    )
