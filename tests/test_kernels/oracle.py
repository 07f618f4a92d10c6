"""Second implementation of NVFP4, in NumPy and float64: no test compares code with itself.

It is independent of the package: E2M1 and E4M3 come from ml_dtypes, the blocked layout from its
closed formula.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

E2M1 = ml_dtypes.float4_e2m1fn
E4M3 = ml_dtypes.float8_e4m3fn
E2M1_GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

Float64 = np.ndarray


def float64(x: Tensor) -> Float64:
    """Exact copy of any float tensor, float8 included."""
    if x.dtype == torch.float8_e4m3fn:
        return x.contiguous().view(torch.uint8).numpy().view(E4M3).astype(np.float64)
    return x.double().numpy()


def unpack(data: Tensor) -> Float64:
    """E2M1 bytes ``(..., K/2)`` to float64 ``(..., K)``, low nibble first."""
    packed = data.numpy()
    codes = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), np.uint8)
    codes[..., 0::2], codes[..., 1::2] = packed & 15, packed >> 4
    return codes.view(E2M1).astype(np.float64)


def pack(values: Float64) -> Tensor:
    """Float64 ``(..., K)`` on the E2M1 grid to bytes ``(..., K/2)``."""
    codes = np.asarray(values).astype(E2M1).view(np.uint8)
    return torch.from_numpy(codes[..., 0::2] | codes[..., 1::2] << 4)


def e4m3(values: Float64) -> Tensor:
    """Float64 to float8_e4m3fn."""
    return torch.from_numpy(values.astype(E4M3).view(np.uint8)).view(torch.float8_e4m3fn)


def dequantize(data: Tensor, linear_scales: Tensor, global_scale: Float64 | float) -> Float64:
    """Exact float64 values of an NVFP4 tensor, with global scale ``()`` or ``(..., rows)``."""
    per_block = np.repeat(float64(linear_scales), 16, axis=-1)
    # 2 + 4 + 24 significant bits fit float64's 53.
    factor = np.asarray(global_scale, np.float64)
    return unpack(data) * per_block * (factor[..., None] if factor.ndim else factor)


def product(a: Float64, b: Float64) -> Float64:
    """A · Bᵀ of ``(..., M, K)`` and ``(..., N, K)``."""
    return (torch.from_numpy(a) @ torch.from_numpy(b).mT).numpy()


def blocked_offsets(rows: int, cols: int) -> np.ndarray:
    """Byte offset of every scale in the blocked layout: int64 ``(rows, cols)``."""
    r, c = np.ogrid[:rows, :cols]
    atom = (r // 128) * -(-cols // 4) + c // 4
    return atom * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4


def blocked(linear_scales: Tensor) -> Tensor:
    """Linear scales ``(..., rows, cols)`` in the blocked layout, padding zero."""
    *batch, rows, cols = linear_scales.shape
    row_tiles, col_tiles = -(-rows // 128), -(-cols // 4)
    flat = np.zeros((*batch, row_tiles * col_tiles * 512), np.uint8)
    flat[..., blocked_offsets(rows, cols)] = linear_scales.view(torch.uint8).numpy()
    atoms = torch.from_numpy(flat).view(*batch, row_tiles, col_tiles, 32, 16)
    return atoms.view(linear_scales.dtype)


@dataclass(frozen=True)
class Operand:
    """A packed matrix and its values.

    Attributes:
        data: uint8 ``(..., rows, K/2)``.
        scales: float8_e4m3fn, blocked.
        values: float64 ``(..., rows, K)``, without a global scale.
    """

    data: Tensor
    scales: Tensor
    values: Float64


def operand(codes: Float64, linear_scales: Tensor, terms: int = 1) -> Operand:
    """Pack E2M1 values ``(..., rows, K)`` with their scales ``(..., rows, K/16)``.

    With several terms, the shapes are ``(..., terms, rows, K)``, and the values add up.
    """
    data = pack(codes)
    values = dequantize(data, linear_scales, 1.0)
    if terms == 1:
        return Operand(data, blocked(linear_scales), values)
    return Operand(data, blocked(stacked(linear_scales)), values.sum(-3))


def stacked(linear_scales: Tensor) -> Tensor:
    """Stack ``(..., terms, rows, columns)``: terms start at multiples of 32 or of 128 rows."""
    *batch, terms, rows, columns = linear_scales.shape
    pitch = 32 if 0 < rows <= 32 else (rows + 127) // 128 * 128
    spaced = np.zeros((*batch, terms * pitch, columns), np.uint8)
    for term in range(terms):
        given = linear_scales.view(torch.uint8).numpy()[..., term, :, :]
        spaced[..., term * pitch : term * pitch + rows, :] = given
    return torch.from_numpy(spaced).view(linear_scales.dtype)


def grid_operand(rng: np.random.Generator, *shape: int, terms: int = 1) -> Operand:
    """Small integers and power-of-two scales: float32 sums of products are exact."""
    shape = _of_terms(shape, terms)
    codes = rng.choice([-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0], size=shape)
    scales = rng.choice([0.5, 1.0, 2.0], size=(*shape[:-1], shape[-1] // 16))
    return operand(codes, e4m3(scales), terms)


def positive_operand(rng: np.random.Generator, *shape: int, terms: int = 1) -> Operand:
    """Operand of the values 1, 2 and 4."""
    shape = _of_terms(shape, terms)
    codes = rng.choice([1.0, 2.0], size=shape)
    scales = rng.choice([1.0, 2.0], size=(*shape[:-1], shape[-1] // 16))
    return operand(codes, e4m3(scales), terms)


def random_operand(rng: np.random.Generator, *shape: int, terms: int = 1) -> Operand:
    """Operand of any E2M1 codes, with scales over 12 octaves and all mantissas."""
    shape = _of_terms(shape, terms)
    codes = rng.choice([*E2M1_GRID, *(-v for v in E2M1_GRID)], size=shape)
    scales = 2.0 ** rng.uniform(-6, 6, size=(*shape[:-1], shape[-1] // 16))
    return operand(codes, e4m3(scales), terms)


def _of_terms(shape: tuple[int, ...], terms: int) -> tuple[int, ...]:
    return shape if terms == 1 else (*shape[:-2], terms, *shape[-2:])
