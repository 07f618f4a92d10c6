"""NVFP4 weights whose block scales are folded into E4M3 elements: the layout of FP8 products.

FP8 tensor cores multiply 32 elements of K at once and cannot apply a scale to 16 of them. So a
kernel decodes an element to ``E4M3(code · scale · 2^e)``, where ``e`` belongs to the row, and
multiplies the sums of the row by ``2^-e``. Codes stay in 4 bits, as in the checkpoint. The product
of code and scale has up to 6 significant bits, E4M3 has 4: the rounding error has an RMS of about
2.3 % of the weights, compared with 9.5 % of NVFP4 itself.

``e`` is the largest with which no scale of the row exceeds 72: 6 · 72 rounds to E4M3's maximum,
448. Scales below 2⁻⁵ would make codes subnormal, which decoding does not support: such blocks,
which are 2⁻¹¹ of the row's largest or less, are rounded to E2M1 again, with the scale 2⁻⁵.

Rows are cut into tiles of 64, K into tiles of 128, padded with zeros. A tile is two halves of 64
elements of K, in the order of ``formats.fp8_rows``. Lane ``4 g + c`` of warp ``w`` holds block
``c`` of each half in the rows ``16 w + g`` (upper) and ``16 w + g + 8`` (lower):

* *data*: uint8 ``(row tiles, K tiles, 2, 4, 32, 16)``: half, warp, lane, and four little-endian
  32-bit words: upper and lower row for the half's first ``wgmma`` (32 elements of K), then for its
  second. A word holds eight codes in stored order: the magnitude of code ``n`` at bits ``4 n`` to
  ``4 n + 2``, as selectors of ``prmt``; the signs of codes 0 to 3 at bits 7, 15, 23 and 31, those
  of codes 4 to 7 four bits lower.
* *scales*: int32 ``(row tiles, K tiles, 4, 32)``: warp, lane, and bytes of the first half's upper
  and lower row, then the second half's: a positive E4M3 number in bits 0 to 6; bit 7 says whether
  1.5 times the number is 5 (else 4) E4M3 steps larger.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument, check_dtype, check_shape
from nvfp4_kernels.each_row import row_product
from nvfp4_kernels.formats.fp8_rows import GROUP, group_order
from nvfp4_kernels.formats.nvfp4 import BLOCK_SIZE, decode_e2m1, encode_e2m1

TILE_ROWS, TILE_K = 64, 128
WARPS, LANES, HALVES = 4, 32, 2
LARGEST_SCALE, SMALLEST_SCALE = 72.0, 2.0**-5
# Relative RMS error of a row that counts as well folded. Rounding alone makes at most 1/21 (4.8 %),
# of 1.5, 3 and 6 times 1.75; random rows have about 2.1 %, short ones up to 4.5 %.
MAX_ROW_ERROR = 0.05
_AT_ONCE = 1 << 22  # elements that are folded together


class FoldedWeight(NamedTuple):
    """Weight, or stack of weights, in the folded layout.

    Attributes:
        data: uint8 ``(..., row tiles, K tiles, 2, 4, 32, 16)``.
        scales: int32 ``(..., row tiles, K tiles, 4, 32)``.
        row_scale: float32 ``(..., N)``, ``2^-e`` of each row.
        row_error: float32 ``(..., N)``, RMS of the folding error divided by the RMS of the row; 0
            for a row of zeros.
    """

    data: Tensor
    scales: Tensor
    row_scale: Tensor
    row_error: Tensor


def folded_shapes(n: int, k: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the data and the scales of a weight of ``n`` rows of ``k`` elements."""
    tiles = (-(-n // TILE_ROWS), -(-k // TILE_K))
    return (*tiles, HALVES, WARPS, LANES, 16), (*tiles, WARPS, LANES)


def to_folded(data: Tensor, scales: Tensor) -> FoldedWeight:
    """Convert a weight, or a stack of weights, to the folded layout; done once, at load.

    Args:
        data: uint8 ``(..., N, K/2)``, two E2M1 codes per byte, K a multiple of 16.
        scales: float8_e4m3fn ``(..., N, K/16)``, linear. The sign of a negative scale moves to the
            codes; no scale may be NaN.

    Raises:
        InvalidArgument: dtypes or shapes do not fit, or a scale is NaN.
    """
    check_dtype("data", data, (torch.uint8,))
    check_dtype("scales", scales, (torch.float8_e4m3fn,))
    if data.ndim < 2 or data.shape[-1] % (BLOCK_SIZE // 2):
        raise InvalidArgument(
            f"data: shape is {tuple(data.shape)}, must be (..., N, K/2) with K a multiple of 16; "
            "pad K with zeros"
        )
    *batch, n, k = *data.shape[:-1], 2 * data.shape[-1]
    check_shape("scales", scales, (*batch, n, k // BLOCK_SIZE), "linear scales of the same weight")
    shapes, matrices = folded_shapes(n, k), math.prod(batch)
    out = FoldedWeight(
        data.new_empty((matrices, *shapes[0])),
        data.new_empty((matrices, *shapes[1]), dtype=torch.int32),
        data.new_empty((matrices, n), dtype=torch.float32),
        data.new_empty((matrices, n), dtype=torch.float32),
    )
    flat, linear = data.reshape(matrices, n, k // 2), scales.reshape(matrices, n, k // BLOCK_SIZE)
    tiles = max(1, _AT_ONCE // max(1, TILE_ROWS * k))
    for matrix in range(matrices):
        for tile in range(0, shapes[0][0], tiles):
            rows = slice(tile * TILE_ROWS, min((tile + tiles) * TILE_ROWS, n))
            codes, folded, out.row_scale[matrix, rows], out.row_error[matrix, rows] = _fold(
                flat[matrix, rows], linear[matrix, rows].float()
            )
            part = matrix, slice(tile, tile + tiles)
            out.data[part], out.scales[part] = _pack_data(codes), _pack_scales(folded)
    return FoldedWeight(*(each.view(*batch, *each.shape[1:]) for each in out))


def _fold(data: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes uint8 ``(N, K)``, E4M3 scales ``(N, K/16)``, row scales and row errors of a matrix."""
    if scales.isnan().any():
        raise InvalidArgument(
            "scales: one or more are NaN, must be finite; the checkpoint is damaged, load it again"
        )
    exact = decode_e2m1(data).unflatten(-1, (-1, BLOCK_SIZE)) * scales.unsqueeze(-1)
    largest = scales.abs().amax(-1) if scales.shape[-1] else scales.new_zeros(len(scales))
    exponent = _row_exponent(largest)
    target = torch.ldexp(scales.abs(), exponent.unsqueeze(-1)).clamp(min=SMALLEST_SCALE)
    lifted = torch.ldexp(exact, exponent.view(-1, 1, 1))
    # Exact, unless the scale was too small: a power of two and a sign apart, a code is kept.
    packed = encode_e2m1((lifted / target.unsqueeze(-1)).flatten(-2))
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    kept = _folded_values(codes, target)
    error, total = ((kept - lifted).square(), lifted.square())
    ratio = error.sum((-2, -1)) / total.sum((-2, -1))
    row_error = torch.where(total.sum((-2, -1)) > 0, ratio.sqrt(), 0.0)
    return (
        codes,
        target.to(torch.float8_e4m3fn),
        torch.ldexp(torch.ones_like(largest), -exponent),
        row_error,
    )


def _row_exponent(largest: Tensor) -> Tensor:
    """Largest ``e`` with ``largest · 2^e ≤ 72``; 0 for a row without scales."""
    mantissa, exponent = torch.frexp(largest)  # mantissa in [0.5, 1)
    limit = math.frexp(LARGEST_SCALE)
    found = limit[1] - exponent - (mantissa > limit[0]).int()
    return torch.where(largest > 0, found, 0)


def _folded_values(codes: Tensor, scales: Tensor) -> Tensor:
    """Values ``E4M3(code · scale)``, float32 ``(N, K/16, 16)``."""
    packed = codes[..., ::2] | codes[..., 1::2] << 4
    exact = decode_e2m1(packed).unflatten(-1, (-1, BLOCK_SIZE)) * scales.unsqueeze(-1)
    return exact.to(torch.float8_e4m3fn).float()


def decode_folded(data: Tensor, scales: Tensor, n: int, k: int) -> Tensor:
    """Values as tensor cores multiply them, E4M3 as float32 ``(n, k)``, without ``row_scale``.

    Args:
        data: uint8 ``(row tiles, K tiles, 2, 4, 32, 16)``.
        scales: int32 ``(row tiles, K tiles, 4, 32)``.
        n: number of rows.
        k: number of elements per row.
    """
    shapes = folded_shapes(n, k)
    check_shape("data", data, shapes[0], f"the folded layout of {n} × {k} elements")
    check_shape("scales", scales, shapes[1], f"the folded layout of {n} × {k} elements")
    codes, linear = _unpack_data(data), _unpack_scales(scales)
    return _folded_values(codes, linear.float()).flatten(-2)[:n, :k].contiguous()


def folded_product(
    a: Tensor, data: Tensor, scales: Tensor, n: int, batch_invariant: bool = False
) -> Tensor:
    """A · Bᵀ with a folded weight: float32 ``(..., M, n)``, without any row's scale.

    Args:
        a: E4M3 values as float32 ``(..., M, K)``.
        data: see ``decode_folded``.
        scales: see ``decode_folded``.
        n: number of rows of the weight.
        batch_invariant: whether each row of the result depends on the same row of ``a`` alone.
    """
    weight = decode_folded(data, scales, n, a.shape[-1])
    return (row_product if batch_invariant else torch.matmul)(a, weight.mT)


def _in_tiles(x: Tensor, columns: int, value: int) -> Tensor:
    """Pad a matrix to whole tiles: ``(row tiles, 64, K tiles, columns)``."""
    down, across = -x.shape[0] % TILE_ROWS, -x.shape[1] % columns
    whole = torch.nn.functional.pad(x, (0, across, 0, down), value=value)
    return whole.view(-1, TILE_ROWS, whole.shape[1] // columns, columns)


def _pack_data(codes: Tensor) -> Tensor:
    # A half's 64 bytes in stored order are (wgmma 2, part 2, c 4, byte 4); a row is (w, half, g).
    stored = _in_tiles(codes, TILE_K, 0).unflatten(-1, (HALVES, GROUP))[..., list(group_order())]
    parts = stored.view(-1, WARPS, 2, 8, stored.shape[2], HALVES, 2, 2, 4, 4)
    # (row tile, w, row, g, K tile, half, wgmma, part, c, byte)
    # -> (row tile, K tile, half, w, g, c, wgmma, row, code)
    eights = parts.permute(0, 4, 5, 1, 3, 8, 6, 2, 7, 9).flatten(-2).int()
    words = torch.zeros(eights.shape[:-1], dtype=torch.int32, device=codes.device)
    for n in range(8):
        words |= (eights[..., n] & 7) << 4 * n | eights[..., n] >> 3 << _sign_bit(n)
    return words.view(torch.uint8).view(*words.shape[:4], LANES, 16)


def _unpack_data(data: Tensor) -> Tensor:
    rows, across = data.shape[:2]
    words = data.contiguous().view(torch.int32).view(rows, across, HALVES, WARPS, 8, 4, 2, 2)
    codes = [words >> 4 * n & 7 | (words >> _sign_bit(n) & 1) << 3 for n in range(8)]
    eights = torch.stack(codes, -1).unflatten(-1, (2, 4)).to(torch.uint8)
    # (row tile, K tile, half, w, g, c, wgmma, row, part, byte) -> as in ``_pack_data``
    parts = eights.permute(0, 3, 7, 4, 1, 2, 6, 8, 5, 9)
    inverse = sorted(range(GROUP), key=group_order().__getitem__)
    stored = parts.reshape(rows * TILE_ROWS, across, HALVES, GROUP)[..., inverse]
    return stored.reshape(rows * TILE_ROWS, across * TILE_K)


def _sign_bit(code: int) -> int:
    return 8 * code + 7 if code < 4 else 8 * (code - 4) + 3


def _pack_scales(scales: Tensor) -> Tensor:
    raw = scales.view(torch.uint8)
    mantissa = raw & 7
    raw = raw | ((mantissa >= 1) & (mantissa <= 5)).to(torch.uint8) << 7
    tiles = _in_tiles(raw, TILE_K // BLOCK_SIZE, _SMALLEST_BYTE)
    parts = tiles.view(-1, WARPS, 2, 8, tiles.shape[2], HALVES, 4)
    # (row tile, w, row, g, K tile, half, c) -> (row tile, K tile, w, g, c, half, row)
    words = parts.permute(0, 4, 1, 3, 6, 5, 2).flatten(-2).contiguous().view(torch.int32)
    return words.reshape(*words.shape[:3], LANES)


def _unpack_scales(scales: Tensor) -> Tensor:
    rows, across = scales.shape[:2]
    raw = scales.contiguous().view(torch.uint8).view(rows, across, WARPS, 8, 4, HALVES, 2) & 127
    linear = raw.permute(0, 2, 6, 3, 1, 5, 4).reshape(rows * TILE_ROWS, -1)
    return linear.contiguous().view(torch.float8_e4m3fn)


_SMALLEST_BYTE = 0x10  # SMALLEST_SCALE in E4M3
