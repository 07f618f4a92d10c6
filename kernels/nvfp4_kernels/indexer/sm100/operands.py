"""Keys and queries: tensor maps on the host, and where a key's page is."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Int32, Int64, Uint8
from cutlass.experimental.cuda import TensorMap, create_tensor_map_tiled

from nvfp4_kernels.indexer.sm100.scheduler import Work
from nvfp4_kernels.indexer.sm100.tile import KEYS, ScoreTile
from nvfp4_kernels.indexer.sm100.variant import Variant
from nvfp4_kernels.sm100.descriptors import TENSOR_MAP_SWIZZLES
from nvfp4_kernels.sm100.limits import WARP_ROWS


@dataclass(frozen=True)
class Pages:
    """Where the keys of a sequence are. Keys in a row are a single page, of number 0.

    Attributes:
        table: int32 [sequences, table_stride], numbers of pages; null unless paged.
        table_stride: entries.
        count: of pages: the number of one that does not exist.
        stride: bytes from one to the next.
        scales: of the first page's first key.
    """

    table: cute.Pointer
    table_stride: Int32
    count: Int32
    stride: Int64
    scales: cute.Pointer


@dataclass(frozen=True)
class PageFinder:
    """Looks up the pages of a CTA's keys, 32 boxes at a time, one to a lane.

    A box is what a tensor map copies at once: keys of one page. A lane that needs a page gets it
    from the lane that has it; each lookup thus serves several tiles, and is asked for before the
    tiles before them are through.
    """

    variant: Variant

    @property
    def tiles(self) -> int:
        """Key tiles of a lookup."""
        return WARP_ROWS // self.variant.boxes

    @cute.jit
    def look_up(self, pages: Pages, work: Work, batch: Int32) -> Int32:
        """This lane's of the ``batch``-th lookup: a page that is not there for keys nobody sees."""
        variant = self.variant
        page = Int32(0)
        if cutlass.const_expr(variant.paged):
            page = pages.count
            box = batch * WARP_ROWS + cute.arch.lane_idx()
            key = work.first_tile * KEYS + box * variant.box_rows
            if key < work.end and box < work.tiles * variant.boxes:
                entry = work.sequence.to(Int64) * pages.table_stride + key // variant.page_size
                page = Array(pages.table, shape=(1,)).load(entry)
        return page

    def of_row(self, looked_up: Int32, tile: Int32, row: Int32 | int) -> Int32:
        """The page of a row of a key tile, the ``tile``-th of the lookup."""
        if not self.variant.paged:
            return looked_up
        lane = tile * self.variant.boxes + row // self.variant.box_rows
        return Int32(cute.arch.shuffle_sync(looked_up, lane))


def scale_address(
    variant: Variant, pages: Pages, page: Int32, key: Int32, scale_bytes: int
) -> Int64:
    """Of the scales of a key that somebody sees."""
    start = Int64(pages.scales.toint())
    if not variant.paged:
        return start + Int64(key) * scale_bytes
    return start + Int64(page) * pages.stride + key % variant.page_size * scale_bytes


def key_map(
    tile: ScoreTile, variant: Variant, data: cute.Pointer, keys: Int32, pages: Int32, stride: Int64
) -> TensorMap:
    """Of keys, as bytes: [row, keys of a page, pages]; what lies beyond reads as zeros."""
    rows = Int32(variant.page_size) if variant.paged else keys
    return create_tensor_map_tiled(
        data.toint(),
        Uint8,
        [tile.row_bytes, rows, pages],
        [tile.row_bytes // 16, stride // 16],
        [tile.chunk_bytes, variant.box_rows, 1],
        swizzle=TENSOR_MAP_SWIZZLES[tile.chunk_bytes],
    )


def query_map(tile: ScoreTile, data: cute.Pointer, queries: Int32) -> TensorMap:
    """Of queries, as bytes: [row, heads, queries]; a box has zeros for heads that there are not."""
    return create_tensor_map_tiled(
        data.toint(),
        Uint8,
        [tile.row_bytes, tile.heads, queries],
        [tile.row_bytes // 16, tile.heads * tile.row_bytes // 16],
        [tile.chunk_bytes, tile.head_columns, tile.queries],
        swizzle=TENSOR_MAP_SWIZZLES[tile.chunk_bytes],
    )
