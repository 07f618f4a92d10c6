"""MMA operands in shared memory with their descriptors, and tensor maps of keys and values.

A tile of rows is [chunk, row, chunk bytes], chunks as wide as their swizzle. Queries and keys are
K-major operands, values are MN-major: TMA writes both as a box of [rows, chunk bytes].
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Array, Int32, Int64
from cutlass.experimental import primitives as ptx
from cutlass.experimental.cuda import TensorMap, TensorMapL2Promotion

from nvfp4_kernels.attention.sm100.scheduler import Sizes
from nvfp4_kernels.attention.sm100.tile import KEYS, AttentionTile, Variant
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.sm100.descriptors import DESCRIPTOR_SWIZZLES, TENSOR_MAP_SWIZZLES, row_descriptor
from nvfp4_kernels.sm100.tensor_maps import tensor_map


class Strides(NamedTuple):
    """Strides of keys or of values in elements: multiples of 16 bytes."""

    row: Int64
    head: Int64
    page: Int64


def operand_type(tile: AttentionTile, variant: Variant) -> type[cutlass.Numeric]:
    """Element type of the MMAs' operands: Q, K, P and V."""
    return cutlass.Float8E4M3FN if tile.fp8 else TYPES[variant.dtype]


def tensor_maps(
    tile: AttentionTile,
    variant: Variant,
    operands: tuple[tuple[cute.Pointer, Strides], ...],
    sizes: Sizes,
    map_stride: Int64,
    map_rows: Int32,
    defective_below: Int32,
) -> list[TensorMap]:
    """Tensor maps of keys and of values.

    ``map_stride`` and ``map_rows``: see ``_gather_map``; ``defective_below``: see ``tensor_map``.
    """
    if variant.layout == "indexed":
        view = map_stride, map_rows, defective_below
        return [_gather_map(tile, variant, data, *view) for data, _ in operands]
    rest = sizes, defective_below
    return [_key_map(tile, variant, data, strides, *rest) for data, strides in operands]


def _key_map(
    tile: AttentionTile,
    variant: Variant,
    data: cute.Pointer,
    strides: Strides,
    sizes: Sizes,
    defective_below: Int32,
) -> TensorMap:
    """Tensor map [D, rows of a page, heads, pages]; rows past the end read as zeros.

    Pages of a dense tensor are the sequences; a ragged tensor is a single page.
    """
    units = 16 // tile.element_bytes
    rows = variant.page_size if variant.layout == "paged" else sizes.keys
    return tensor_map(
        data.toint(),
        operand_type(tile, variant),
        [tile.head_dim, rows, sizes.kv_heads, sizes.pages],
        [strides.row // units, strides.head // units, strides.page // units],
        [tile.chunk_elements, variant.box_rows, 1, 1],
        defective_below,
        TENSOR_MAP_SWIZZLES[tile.chunk_bytes],
        TensorMapL2Promotion.l2_256b,  # a chunk's neighbours are copied next, except by gathers
    )


def _gather_map(
    tile: AttentionTile,
    variant: Variant,
    data: cute.Pointer,
    stride: Int64,
    rows: Int32,
    defective_below: Int32,
) -> TensorMap:
    """Tensor map [D, rows] with ``stride`` elements between rows, for TMA gathers."""
    return tensor_map(
        data.toint(),
        operand_type(tile, variant),
        [tile.head_dim, rows],
        [stride // (16 // tile.element_bytes)],
        [tile.chunk_elements, 1],
        defective_below,
        TENSOR_MAP_SWIZZLES[tile.chunk_bytes],
    )


def k_major_descriptor(tile: AttentionTile, data: Array) -> Int64:
    """Shared memory descriptor of queries or keys."""
    return row_descriptor(data, tile.chunk_bytes)


def mn_major_descriptor(tile: AttentionTile, data: Array) -> Int64:
    """Shared memory descriptor of values; the leading stride is from one chunk of D to the next."""
    swizzle = DESCRIPTOR_SWIZZLES[tile.chunk_bytes]
    return ptx.Tcgen05SmemDesc.build(
        data, KEYS * tile.chunk_bytes, 8 * tile.chunk_bytes, layout=swizzle
    )
