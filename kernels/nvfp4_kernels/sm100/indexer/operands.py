"""Keys and queries: tensor maps on the host, and where a key's page is."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Int32, Int64, Uint8
from cutlass.experimental.cuda import TensorMap, create_tensor_map_tiled

from nvfp4_kernels.sm100.indexer.tile import ScoreTile, Variant
from nvfp4_kernels.sm100.indexer.work import Work
from nvfp4_kernels.sm100.operands import TENSOR_MAP_SWIZZLES


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


@cute.jit
def page_of(variant: cutlass.Constexpr, pages: Pages, work: Work, key: Int32) -> Int32:
    """The number of a key's page. No entry is read for keys that nobody sees: there is no page."""
    page = Int32(0)
    if cutlass.const_expr(variant.paged):
        page = pages.count
        if key < work.end:
            entry = work.sequence.to(Int64) * pages.table_stride + key // variant.page_size
            page = Array(pages.table, shape=(1,)).load(entry)
    return page


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
