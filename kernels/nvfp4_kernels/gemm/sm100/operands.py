"""Operands of the GEMM: tensor maps on the host, rings in shared memory."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Array, Int32, Int64, Uint8, Uint16
from cutlass.experimental.cuda import TensorMap, TensorMapSwizzle

from nvfp4_kernels.gemm.sm100.tile import ATOMS_K, TILE_BYTES
from nvfp4_kernels.sm100.descriptors import row_descriptor
from nvfp4_kernels.sm100.limits import ATOM_BYTES, ATOM_ROWS, MMA_K
from nvfp4_kernels.sm100.tensor_maps import tensor_map


@dataclass(frozen=True)
class Extent:
    """Extent of an operand in global memory: ``batch`` matrices of ``rows`` × K.

    ``defective_below``: see ``tensor_map``.
    """

    rows: Int32
    k: Int32
    batch: Int32
    defective_below: Int32


@dataclass(frozen=True)
class Operand:
    """Operand in one CTA: tensor maps and shared memory.

    Attributes:
        data_map, scale_map: tensor maps; a box is one CTA's multicast slice.
        data: ring of [rows, 128] bytes per stage, 128-byte swizzle.
        scales: ring of [4 K atoms, row atoms, 512] bytes per stage; None for a term whose scales
            are in the atoms of the first term.
        index: index of the activations' term, or of the weight.
    """

    data_map: TensorMap
    scale_map: TensorMap
    data: Array
    scales: Any
    index: int = 0


def data_map(data: cute.Pointer, extent: Extent, box_rows: int) -> TensorMap:
    """Tensor map of packed E2M1 bytes: [K/2, rows, batch]; out of bounds reads as zeros.

    A box is ``box_rows`` rows of 128 bytes.
    """
    return tensor_map(
        data.toint(),
        Uint8,
        [extent.k // 2, extent.rows, extent.batch],
        [extent.k // 32, Int64(extent.rows) * (extent.k // 32)],
        [TILE_BYTES, box_rows, 1],
        extent.defective_below,
        TensorMapSwizzle.s128b,
    )


def scale_map(scales: cute.Pointer, extent: Extent, box_atoms: int, box_k: int) -> TensorMap:
    """Tensor map of the scales' 512-byte atoms: [atom, row atoms, K atoms, batch].

    A box is [``box_k`` K atoms, ``box_atoms`` row atoms, 512] bytes in shared memory.
    """
    across = cute.ceil_div(extent.k, MMA_K)
    down = cute.ceil_div(extent.rows, ATOM_ROWS)
    units = ATOM_BYTES // 16
    return tensor_map(
        scales.toint(),
        Uint16,
        [ATOM_BYTES // 2, down, across, extent.batch],
        [across * units, units, Int64(down) * across * units],
        [ATOM_BYTES // 2, box_atoms, box_k, 1],
        extent.defective_below,
    )


def data_descriptor(data: Array) -> Int64:
    """Shared-memory descriptor of the rows at the start of ``data``, in 128-byte swizzle."""
    return row_descriptor(data, TILE_BYTES)


def shared_operand(
    maps: tuple[TensorMap, TensorMap], stages: int, rows: int, atoms: int, index: int = 0
) -> Operand:
    """Allocate an operand's ring of ``stages`` tiles of ``rows`` rows in shared memory.

    Each tile has ``atoms`` row atoms of scales; 0: no scales.
    """
    space = cutlass.AddressSpace.smem
    scales = None
    if atoms:
        scales = Array(Uint8, stages * ATOMS_K * atoms * ATOM_BYTES, space=space, alignment=128)
    return Operand(
        *maps,
        data=Array(Uint8, stages * rows * TILE_BYTES, space=space, alignment=1024),
        scales=scales,
        index=index,
    )
