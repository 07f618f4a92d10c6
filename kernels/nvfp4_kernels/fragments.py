"""Weights as a warp's registers take them: the layout for tensor cores that know no FP4.

A kernel that multiplies 16-bit activations with an NVFP4 weight decodes the weight in registers, on
its way to ``wgmma`` or ``mma.sync``. In this layout a thread finds what it needs in one 16-byte and
one 8-byte load, in the order in which it is decoded.

Rows and K are cut into tiles of 64 × 64, padded with zeros. Lane ``4 g + t`` of warp ``w`` holds,
of each tile and of each 16 elements of K, what the instructions take as A (PTX ISA, "Register
Fragments for wgmma.mma_async.m64nNk16"): rows ``16 w + g`` (upper) and ``16 w + g + 8`` (lower), at
k = ``2 t``, ``2 t + 1``, ``2 t + 8`` and ``2 t + 9``.

* *data*: uint8 ``(row tiles, K tiles, 4, 32, 16)``: warp, lane, and a little-endian 32-bit word for
  each 16 of K. It holds four pairs of E2M1 codes, one per register of A: upper row, lower row, and
  the same 8 elements on. ``SOURCES`` says where their bits lie: rotating the word left by
  ``ROTATIONS`` and masking gives bfloat16 of 2⁻¹²⁶ times a pair's values, that of even k in the low
  half. No layout does with one rotation per pair; this one does with one more.
* *scales*: uint8 ``(row tiles, K tiles, 4, 8, 8)``: warp, ``g``, and a word for each 32 of K, with
  four scales of 8 bits: of its first 16, upper row at bits 11 to 4, lower row at bits 27 to 20; of
  its second 16 at the same places after rotating left by 8. A scale is an unsigned number of 5 bits
  of exponent and 3 of mantissa, E4M3 without subnormals: ``(1 + mantissa / 8) · 2^(exponent-22)``.
  Exponent 31 is NaN. There is no zero: where a scale is, the elements are. A negative scale's sign
  moves to its elements.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument, check_dtype, check_shape
from nvfp4_kernels.nvfp4 import BLOCK_SIZE, decode_e2m1, to_blocked

TILE = 64  # rows and elements of K
WARPS, LANES = 4, 32
STEPS = TILE // BLOCK_SIZE  # words of a lane: 16 elements of K each

# bfloat16's bits of an E2M1 code: sign, then magnitude, high bit first.
TARGETS = (15, 8, 7, 6)
# Of each pair in a word: by how much each target's bit is to be rotated left.
ROTATIONS = ((2, 2, 2, 2), (6, 6, 6, 6), (8, 0, 8, 8), (12, 12, 12, 12))
SCALE_BIT = 4

EXPONENT_BIAS = 22
NAN_SCALE = 0xFF
_LEAST_EXPONENT = -9  # of an E4M3 number: its smallest subnormal


class Fragments(NamedTuple):
    """A weight in this layout.

    Attributes:
        data: uint8 ``(row tiles, K tiles, 4, 32, 16)``.
        scales: uint8 ``(row tiles, K tiles, 4, 8, 8)``.
    """

    data: Tensor
    scales: Tensor


def fragment_shapes(n: int, k: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the data and the scales of a weight of ``n`` rows and ``k`` elements each."""
    tiles = (-(-n // TILE), -(-k // TILE))
    return (*tiles, WARPS, LANES, 16), (*tiles, WARPS, 8, 8)


def to_fragments(data: Tensor, scales: Tensor) -> Fragments:
    """Bring a weight into this layout; done once, at load.

    Args:
        data: uint8 ``(N, K/2)``, two E2M1 codes per byte, K a multiple of 16.
        scales: float8_e4m3fn ``(N, K/16)``, linear.

    Returns:
        The same values exactly, padded to whole tiles.

    Raises:
        InvalidArgument: dtypes or shapes that do not fit.
    """
    check_dtype("data", data, (torch.uint8,))
    check_dtype("scales", scales, (torch.float8_e4m3fn,))
    if data.ndim != 2 or data.shape[1] % (BLOCK_SIZE // 2):
        raise InvalidArgument(
            f"data: shape is {tuple(data.shape)}, must be (N, K/2) with K a multiple of 16; "
            "pad K with zeros, and bring each matrix of a batch into this layout by itself"
        )
    n, k = data.shape[0], 2 * data.shape[1]
    check_shape("scales", scales, (n, k // BLOCK_SIZE), "linear scales of the same weight")
    padded_n, padded_k = -n % TILE, -k % TILE
    codes = torch.stack([data & 15, data >> 4], dim=-1).flatten(-2)
    blocks = codes.unflatten(-1, (-1, BLOCK_SIZE))
    raw = scales.view(torch.uint8)
    blocks = blocks * (raw & 0x7F != 0).unsqueeze(-1) ^ (raw >> 7 << 3).unsqueeze(-1)
    codes = torch.nn.functional.pad(blocks.flatten(-2), (0, padded_k, 0, padded_n))
    stored = _scale_codes(data.device)[(raw & 0x7F).int()]
    stored = torch.nn.functional.pad(stored, (0, padded_k // BLOCK_SIZE, 0, padded_n), value=1 << 3)
    return settled(Fragments(_pack_data(codes), _pack_scales(stored)))


def settled(weight: Fragments) -> Fragments:
    """``weight``, once it is in memory: whatever writes one must end with this.

    Kernels load weights before they wait for what was launched before them, so that a launch that
    has yet to write the weight would be overtaken.
    """
    if weight.data.is_cuda:
        torch.cuda.current_stream(weight.data.device).synchronize()
    return weight


def from_fragments(data: Tensor, scales: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
    """Undo ``to_fragments``: data uint8 ``(n, k/2)`` and linear scales float8_e4m3fn ``(n, k/16)``.

    The same values; of blocks of zeros the scale is the smallest one.
    """
    shapes = fragment_shapes(n, k)
    check_shape("data", data, shapes[0], f"the layout of {n} × {k} elements")
    check_shape("scales", scales, shapes[1], f"the layout of {n} × {k} elements")
    codes = _unpack_data(data)[:n, :k]
    stored = _unpack_scales(scales)[:n, : k // BLOCK_SIZE].int()
    values = torch.ldexp((8 + (stored & 7)).float() / 8, (stored >> 3) - EXPONENT_BIAS)
    values = torch.where(stored >> 3 == 31, torch.nan, values)
    return codes[:, 0::2] | codes[:, 1::2] << 4, values.to(torch.float8_e4m3fn)


def decode_fragments(data: Tensor, scales: Tensor, n: int, k: int) -> Tensor:
    """Values without the global scale: float32 ``(n, k)``, exact."""
    packed, linear = from_fragments(data, scales, n, k)
    blocks = decode_e2m1(packed).unflatten(-1, (-1, BLOCK_SIZE))
    return (blocks * linear.float().unsqueeze(-1)).flatten(-2)


def blocked_weight(b: Tensor, b_scales: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
    """A weight in either layout, as one in the blocked layout.

    Args:
        b: uint8, packed or in fragments.
        b_scales: float8_e4m3fn, blocked, which is returned as it is; or uint8, of fragments.
        n: its rows.
        k: elements of each.
    """
    if b_scales.dtype != torch.uint8:
        return b, b_scales
    data, scales = from_fragments(b, b_scales, n, k)
    return data, to_blocked(scales)


def _scale_codes(device: torch.device) -> Tensor:
    """Stored form of each of the 128 E4M3 numbers without a sign: uint8."""
    numbers = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    mantissa, exponent = torch.frexp(numbers)  # in [0.5, 1)
    codes = (exponent - 1 + EXPONENT_BIAS).int() << 3 | ((mantissa * 16).int() & 7)
    codes[0] = _LEAST_EXPONENT + EXPONENT_BIAS << 3
    codes[127] = NAN_SCALE
    return codes.to(torch.uint8).to(device)


# A tile's rows are (warp 4, half 2, g 8), its K is (step 4, half 2, t 4, parity 2).


def _pack_data(codes: Tensor) -> Tensor:
    rows, columns = codes.shape[0] // TILE, codes.shape[1] // TILE
    tiles = codes.view(rows, WARPS, 2, 8, columns, STEPS, 2, 4, 2)
    # (row tile, warp, row half, g, K tile, step, K half, t, parity)
    # -> (row tile, K tile, warp, g, t, step, K half, row half, parity)
    pairs = tiles.permute(0, 4, 1, 3, 7, 5, 6, 2, 8).flatten(-3, -2).long()
    words = torch.zeros_like(pairs[..., 0, 0])
    for pair, bits in enumerate(_sources()):
        for parity, places in enumerate(bits):
            code = pairs[..., pair, parity]
            for bit, place in zip((3, 2, 1, 0), places, strict=True):
                words |= (code >> bit & 1) << place
    return _bytes(words).reshape(rows, columns, WARPS, LANES, 16)


def _unpack_data(data: Tensor) -> Tensor:
    rows, columns = data.shape[:2]
    words = _words(data.view(rows, columns, WARPS, 8, 4, STEPS, 4))
    pairs = []
    for bits in _sources():
        for places in bits:
            code = torch.zeros_like(words)
            for bit, place in zip((3, 2, 1, 0), places, strict=True):
                code |= (words >> place & 1) << bit
            pairs.append(code)
    # (row tile, K tile, warp, g, t, step, K half, row half, parity)
    tiles = torch.stack(pairs, dim=-1).unflatten(-1, (2, 2, 2)).to(torch.uint8)
    return tiles.permute(0, 2, 7, 3, 1, 5, 6, 4, 8).reshape(rows * TILE, columns * TILE)


def _sources() -> list[tuple[list[int], list[int]]]:
    """Positions of the bits of each pair's codes in a word: of even k, and of odd k."""
    return [
        (
            [(target - by) % 32 for target, by in zip(TARGETS, rotations, strict=True)],
            [(target + 16 - by) % 32 for target, by in zip(TARGETS, rotations, strict=True)],
        )
        for rotations in ROTATIONS
    ]


def _pack_scales(stored: Tensor) -> Tensor:
    rows, columns = stored.shape[0] // TILE, stored.shape[1] // STEPS
    tiles = stored.view(rows, WARPS, 2, 8, columns, 2, 2).long()
    # (row tile, warp, row half, g, K tile, word, step of it)
    # -> (row tile, K tile, warp, g, word, step of it, row half)
    scales = tiles.permute(0, 4, 1, 3, 5, 6, 2)
    first, second = (scales[..., i, 0] | scales[..., i, 1] << 16 for i in range(2))
    second = second << SCALE_BIT
    turned = (second >> 8 | second << 24) & 0xFFFFFFFF
    return _bytes(first << SCALE_BIT | turned).reshape(rows, columns, WARPS, 8, 8)


def _unpack_scales(scales: Tensor) -> Tensor:
    rows, columns = scales.shape[:2]
    words = _words(scales.view(rows, columns, WARPS, 8, 2, 4))
    turned = (words << 8 | words >> 24) & 0xFFFFFFFF
    places = (SCALE_BIT, SCALE_BIT + 16)
    stored = [word >> place & 0xFF for word in (words, turned) for place in places]
    # (row tile, K tile, warp, g, word, step of it, row half)
    tiles = torch.stack(stored, dim=-1).unflatten(-1, (2, 2)).to(torch.uint8)
    return tiles.permute(0, 2, 6, 3, 1, 4, 5).reshape(rows * TILE, columns * STEPS)


def _bytes(words: Tensor) -> Tensor:
    """Little-endian, in a new last dimension of 4."""
    return torch.stack([words >> at & 0xFF for at in (0, 8, 16, 24)], dim=-1).to(torch.uint8)


def _words(parts: Tensor) -> Tensor:
    wide = parts.long()
    return wide[..., 0] | wide[..., 1] << 8 | wide[..., 2] << 16 | wide[..., 3] << 24
