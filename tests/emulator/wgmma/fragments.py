"""Register fragments of m64nNk16 (PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16").

Warp w of the warpgroup holds rows 16 w to 16 w + 15. Its lane t holds rows t / 4 and t / 4 + 8.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from tests.emulator.tcgen05.formats import Element, decode

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]

ROWS = 64
DEPTH = 16
WARPS = 4


def a_matrix(registers: Words, element: Element) -> Floats:
    """Matrix A, float32 [64, 16], from words [warp, register, lane].

    Each register holds columns 2 (t % 4) and 2 (t % 4) + 1, register 0 of the upper row, register 1
    of the lower row; registers 2 and 3 hold the columns 8 further.
    """
    raw = np.ascontiguousarray(registers).reshape(-1, 32).view(np.uint8)
    elements = decode(raw, element).reshape(WARPS, 2, 2, 8, 4, 2)
    return elements.transpose(0, 2, 3, 1, 4, 5).reshape(ROWS, DEPTH)


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
