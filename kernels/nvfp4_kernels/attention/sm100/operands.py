"""Keys, values and queries in shared memory: chunks of rows, as wide as their swizzle.

A tile of rows is [chunk, row, chunk bytes]. Keys and queries are read along their rows (K-major),
values across them (MN-major): both are what a copy of [rows, chunk bytes] leaves behind.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Int32, Int64
from cutlass.experimental import primitives as ptx
from cutlass.experimental.cuda import TensorMap, create_tensor_map_tiled

from nvfp4_kernels.attention.sm100.scheduler import Sizes
from nvfp4_kernels.attention.sm100.tile import KEYS, AttentionTile, Variant
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.sm100.descriptors import DESCRIPTOR_SWIZZLES, TENSOR_MAP_SWIZZLES, row_descriptor


@dataclass(frozen=True)
class Strides:
    """Elements from one to the next, of keys or of values: multiples of 16 bytes."""

    row: Int64
    head: Int64
    page: Int64


def operand_type(tile: AttentionTile, variant: Variant) -> type[cutlass.Numeric]:
    """Of everything that the tensor core multiplies."""
    return cutlass.Float8E4M3FN if tile.fp8 else TYPES[variant.dtype]


def tensor_maps(
    tile: AttentionTile,
    variant: Variant,
    operands: tuple[tuple[cute.Pointer, Strides], ...],
    sizes: Sizes,
    step: Int64,
    rows: Int32,
) -> list[TensorMap]:
    """Of keys and of values; ``step`` and ``rows``: see ``_row_map``."""
    if variant.layout == "indexed":
        return [_row_map(tile, variant, data, step, rows) for data, _ in operands]
    return [_key_map(tile, variant, data, strides, sizes) for data, strides in operands]


def _key_map(
    tile: AttentionTile, variant: Variant, data: cute.Pointer, strides: Strides, sizes: Sizes
) -> TensorMap:
    """[D, rows of a page, heads, pages]; what lies beyond reads as zeros.

    The pages of dense tensors are the sequences, ragged ones are a single page.
    """
    units = 16 // tile.element_bytes
    rows = variant.page_size if variant.layout == "paged" else sizes.keys
    return create_tensor_map_tiled(
        data.toint(),
        operand_type(tile, variant),
        [tile.head_dim, rows, sizes.kv_heads, sizes.pages],
        [strides.row // units, strides.head // units, strides.page // units],
        [tile.chunk_elements, variant.box_rows, 1, 1],
        swizzle=TENSOR_MAP_SWIZZLES[tile.chunk_bytes],
    )


def _row_map(
    tile: AttentionTile, variant: Variant, data: cute.Pointer, step: Int64, rows: Int32
) -> TensorMap:
    """[D, rows], which begin ``step`` elements apart, to gather some by."""
    return create_tensor_map_tiled(
        data.toint(),
        operand_type(tile, variant),
        [tile.head_dim, rows],
        [step // (16 // tile.element_bytes)],
        [tile.chunk_elements, 1],
        swizzle=TENSOR_MAP_SWIZZLES[tile.chunk_bytes],
    )


def along_rows(tile: AttentionTile, data: Array) -> Int64:
    """Descriptor of queries or keys."""
    return row_descriptor(data, tile.chunk_bytes)


def across_rows(tile: AttentionTile, data: Array) -> Int64:
    """Descriptor of values: the next chunk of D is a leading dimension's stride away."""
    swizzle = DESCRIPTOR_SWIZZLES[tile.chunk_bytes]
    return ptx.Tcgen05SmemDesc.build(
        data, KEYS * tile.chunk_bytes, 8 * tile.chunk_bytes, layout=swizzle
    )
