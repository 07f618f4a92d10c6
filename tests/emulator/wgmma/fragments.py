"""Register fragments of wgmma (PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16", "k32").

Warp w of the warpgroup holds rows 16 w to 16 w + 15. Its lane t holds rows t / 4 and t / 4 + 8.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from tests.emulator.tcgen05.formats import Element, decode

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]

ROWS = 64
ROW_BYTES = 32  # of A and B along K
WARPS = 4


def depth(element: Element) -> int:
    """Number of elements of K of a wgmma."""
    return 8 * ROW_BYTES // element.bits


def a_matrix(registers: Words, element: Element) -> Floats:
    """Matrix A, float32 [64, K], from words [warp, register, lane].

    A register holds e elements, 2 of 16 bits or 4 of 8 bits: columns e (t % 4) and following,
    register 0 of the upper row, register 1 of the lower row; registers 2 and 3 hold the columns
    4 e further.
    """
    raw = np.ascontiguousarray(registers).reshape(-1, 32).view(np.uint8)
    elements = decode(raw, element).reshape(WARPS, 2, 2, 8, 4, 32 // element.bits)
    return elements.transpose(0, 2, 3, 1, 4, 5).reshape(ROWS, depth(element))


def d_matrix(registers: npt.NDArray[Any]) -> Floats:
    """Matrix D, [64, N], from float32 [warp, register, lane].

    Registers 4 j to 4 j + 3 hold columns 8 j + 2 (t % 4) and the next, first of the upper row, then
    of the lower row.
    """
    columns = registers.shape[1] // 4
    parts = registers.reshape(WARPS, columns, 2, 2, 8, 4)
    return parts.transpose(0, 2, 4, 1, 5, 3).reshape(ROWS, 8 * columns)


def d_registers(matrix: Floats, warp: int) -> Floats:
    """Registers of one warp, float32 [register, lane], from D."""
    rows = matrix[16 * warp : 16 * warp + 16]
    columns = matrix.shape[1] // 8
    parts = rows.reshape(2, 8, columns, 4, 2).transpose(2, 0, 4, 1, 3)
    return np.ascontiguousarray(parts).reshape(4 * columns, 32)
