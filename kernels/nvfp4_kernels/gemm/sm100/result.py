"""GEMM result in global memory, and the position of a thread's values."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32
from cutlass.experimental.cuda import TensorMap


@dataclass(frozen=True)
class OutputTensor:
    """Result in global memory: ``batch`` matrices of tokens × weight rows.

    Attributes:
        data: elements of the result's dtype, or bytes of packed E2M1.
        scales: bytes of block scales, blocked layout; NVFP4 only.
        scale: global scale, float32 [1]; if grouped, [experts]; NVFP4 only.
        tensor_map: tensor map for boxes of ``data``; only with ``store`` "tma".
        m, n: numbers of rows (tokens) and of columns (weight rows) of each matrix.
    """

    data: cute.Pointer
    scales: cute.Pointer
    scale: cute.Pointer
    tensor_map: TensorMap
    m: Int32
    n: Int32


@dataclass(frozen=True)
class Chunk:
    """Position of a thread's values in the result.

    Attributes:
        row, column: indices of the first value, along the M and the N side.
        batch: index of the matrix in ``OutputTensor``.
        weight: see ``TileCoord``.
        number: index of the chunk among all chunks of this warp.
    """

    row: Int32
    column: Int32
    batch: Int32
    weight: Int32
    number: Int32
