"""Weights as MMA register fragments: the layout for GPUs whose tensor cores lack FP4.

A kernel that multiplies 16-bit activations with an NVFP4 weight decodes the weight in registers, on
its way to ``wgmma`` or ``mma.sync``. In this layout a thread loads its fragment of a tile, in
decoding order, with one 16-byte and one 8-byte load.

Rows and K are cut into tiles of 64 × 64, padded with zeros. Lane ``4 g + t`` of warp ``w`` holds,
for each tile and each 16 elements of K, the instruction's A fragment (PTX ISA, "Register
Fragments for wgmma.mma_async.m64nNk16"): rows ``16 w + g`` (upper) and ``16 w + g + 8`` (lower), at
k = ``2 t``, ``2 t + 1``, ``2 t + 8`` and ``2 t + 9``.

* *data*: uint8 ``(row tiles, K tiles, 4, 32, 16)``: warp, lane, and a little-endian 32-bit word for
  each 16 elements of K. A word holds four pairs of E2M1 codes, one per register of A: upper
  row, lower row, and both rows 8 elements further. Rotating the word left by ``ROTATIONS`` and
  masking gives a pair as bfloat16, 2⁻¹²⁶ times its values, even k in the low half. In no layout
  does one rotation per pair suffice for all four pairs; here one pair needs two.
* *scales*: uint8 ``(row tiles, K tiles, 4, 8, 8)``: warp, ``g``, and a word for each 32 elements of
  K, with four 8-bit scales: for the first 16 elements, the upper row's at bits 11 to 4 and the
  lower row's at bits 27 to 20; for the second 16, at the same bits after rotating left by 8. A
  scale is an unsigned number with 5 exponent and 3 mantissa bits, E4M3 without subnormals:
  ``(1 + mantissa / 8) · 2^(exponent-22)``. Exponent 31 is NaN. There is no zero scale: the
  elements are zero instead. The sign of a negative scale moves to the elements.
"""

import math
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument, check_dtype, check_shape
from nvfp4_kernels.formats.nvfp4 import BLOCK_SIZE, decode_e2m1, to_blocked

TILE = 64  # rows and elements of K
WARPS, LANES = 4, 32
STEPS = TILE // BLOCK_SIZE  # words of a lane: 16 elements of K each

# bfloat16's bits of an E2M1 code: sign, then magnitude, high bit first.
TARGETS = (15, 8, 7, 6)
# For each pair in a word, the left rotation that brings each bit to its target.
ROTATIONS = ((2, 2, 2, 2), (6, 6, 6, 6), (8, 0, 8, 8), (12, 12, 12, 12))
SCALE_BIT = 4

EXPONENT_BIAS = 22
_AT_ONCE = 1 << 24  # elements that are brought into this layout together
NAN_SCALE = 0xFF
_LEAST_EXPONENT = -9  # of an E4M3 number: its smallest subnormal


class Fragments(NamedTuple):
    """Weight, or stack of weights, as MMA fragments.

    Attributes:
        data: uint8 ``(..., row tiles, K tiles, 4, 32, 16)``.
        scales: uint8 ``(..., row tiles, K tiles, 4, 8, 8)``.
    """

    data: Tensor
    scales: Tensor


def fragment_shapes(n: int, k: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the data and the scales of a weight of ``n`` rows of ``k`` elements."""
    tiles = (-(-n // TILE), -(-k // TILE))
    return (*tiles, WARPS, LANES, 16), (*tiles, WARPS, 8, 8)


def to_fragments(data: Tensor, scales: Tensor) -> Fragments:
    """Convert a weight, or a stack of experts' weights, to fragments; done once, at load.

    Scratch memory is a few times ``_AT_ONCE`` bytes for any size of weight.

    Args:
        data: uint8 ``(..., N, K/2)``, two E2M1 codes per byte, K a multiple of 16.
        scales: float8_e4m3fn ``(..., N, K/16)``, linear.

    Returns:
        The weight with exactly the same values, padded to whole tiles.

    Raises:
        InvalidArgument: dtypes or shapes do not fit.
    """
    check_dtype("data", data, (torch.uint8,))
    check_dtype("scales", scales, (torch.float8_e4m3fn,))
    if data.ndim < 2 or data.shape[-1] % (BLOCK_SIZE // 2):
        raise InvalidArgument(
            f"data: shape is {tuple(data.shape)}, must be (..., N, K/2) with K a multiple of 16; "
            "pad K with zeros"
        )
    *batch, n, k = *data.shape[:-1], 2 * data.shape[-1]
    expected = (*batch, n, k // BLOCK_SIZE)
    check_shape("scales", scales, expected, "linear scales of the same weight")
    shapes, matrices = fragment_shapes(n, k), math.prod(batch)
    fragments = Fragments(*(data.new_empty((matrices, *shape)) for shape in shapes))
    flat, raw = data.reshape(-1, n, k // 2), scales.view(torch.uint8).reshape(-1, *expected[-2:])
    codes = _Codes(_tables(_places(), data.device), _scale_codes(data.device))
    some, tiles = max(1, _AT_ONCE // max(1, n * k)), max(1, _AT_ONCE // max(1, TILE * k))
    for first in range(0, matrices, some):
        for tile in range(0, shapes[0][0], tiles):
            part = slice(first, first + some), slice(tile, tile + tiles)
            rows = part[0], slice(tile * TILE, (tile + tiles) * TILE)
            target = Fragments(*(each[part] for each in fragments))
            _pack(target, flat[rows], raw[rows], codes)
    stacks = (each.view(*batch, *shape) for each, shape in zip(fragments, shapes, strict=True))
    return settled(Fragments(*stacks))


def settled(weight: Fragments) -> Fragments:
    """Synchronise the stream, and return ``weight``; every writer of a weight must call this.

    Kernels load weights before they wait for preceding kernels, and so could read the weight before
    a kernel has written it.
    """
    if weight.data.is_cuda:
        torch.cuda.current_stream(weight.data.device).synchronize()
    return weight


def from_fragments(data: Tensor, scales: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
    """Undo ``to_fragments``: data uint8 ``(..., n, k/2)``, linear float8_e4m3fn ``(..., n, k/16)``.

    The values are the same. A block whose scale was 0 gets zeros and the smallest scale, 2⁻⁹; the
    sign of a negative scale stays with the elements.
    """
    batch, shapes = data.shape[:-5], fragment_shapes(n, k)
    check_shape("data", data, (*batch, *shapes[0]), f"the layout of {n} × {k} elements")
    check_shape("scales", scales, (*batch, *shapes[1]), f"the layout of {n} × {k} elements")
    packed = _unpack_data(data.reshape(-1, *shapes[0]))[:, :n, : k // 2]
    stored = _unpack_scales(scales.reshape(-1, *shapes[1]))[:, :n, : k // BLOCK_SIZE].int()
    values = torch.ldexp((8 + (stored & 7)).float() / 8, (stored >> 3) - EXPONENT_BIAS)
    values = torch.where(stored >> 3 == 31, torch.nan, values).to(torch.float8_e4m3fn)
    return packed.reshape(*batch, n, k // 2), values.view(*batch, n, k // BLOCK_SIZE)


def decode_fragments(data: Tensor, scales: Tensor, n: int, k: int) -> Tensor:
    """Decode the values, without the global scale: float32 ``(..., n, k)``, exact."""
    packed, linear = from_fragments(data, scales, n, k)
    blocks = decode_e2m1(packed).unflatten(-1, (-1, BLOCK_SIZE))
    return (blocks * linear.float().unsqueeze(-1)).flatten(-2)


def blocked_weight(b: Tensor, b_scales: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
    """Data and scales of a weight in the blocked layout, converted if given as fragments.

    Args:
        b: uint8, packed or in fragments.
        b_scales: float8_e4m3fn if blocked, returned unchanged; uint8 if in fragments.
        n: number of rows of the weight.
        k: number of elements per row.
    """
    if b_scales.dtype != torch.uint8:
        return b, b_scales
    data, scales = from_fragments(b, b_scales, n, k)
    return data, to_blocked(scales)


def _scale_codes(device: torch.device) -> Tensor:
    """Stored scale of each E4M3 number without a sign: uint8 ``(128,)``."""
    numbers = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    mantissa, exponent = torch.frexp(numbers)  # in [0.5, 1)
    codes = (exponent - 1 + EXPONENT_BIAS).int() << 3 | ((mantissa * 16).int() & 7)
    codes[0] = _LEAST_EXPONENT + EXPONENT_BIAS << 3
    codes[127] = NAN_SCALE
    return codes.to(torch.uint8).to(device)


class _Codes(NamedTuple):
    """Lookup tables from checkpoint bytes to stored bits.

    Attributes:
        pairs: int32 ``(4, 256)``, bits of a stored word that come from each of four bytes of codes
            (two codes each), by byte value.
        scales: uint8 ``(128,)``, result of ``_scale_codes``.
    """

    pairs: Tensor
    scales: Tensor


def _pack(target: Fragments, data: Tensor, raw: Tensor, codes: _Codes) -> None:
    """Convert ``data`` ``(matrices, rows, K/2)`` and ``raw``, scales as bytes, into ``target``."""
    padded_n, padded_k = -data.shape[1] % TILE, -2 * data.shape[2] % TILE
    blocks = data.unflatten(-1, (-1, BLOCK_SIZE // 2))
    blocks = blocks * (raw & 0x7F != 0).unsqueeze(-1) ^ ((raw >> 7) * 0x88).unsqueeze(-1)
    pairs = torch.nn.functional.pad(blocks.flatten(-2), (0, padded_k // 2, 0, padded_n))
    padding = (0, padded_k // BLOCK_SIZE, 0, padded_n)
    scales = torch.nn.functional.pad(codes.scales[(raw & 0x7F).int()], padding, value=1 << 3)
    target.data.copy_(_pack_data(pairs, codes.pairs))
    target.scales.copy_(_pack_scales(scales))


# Words are int32, whose bytes are little-endian wherever torch runs. A tile's rows are (warp 4,
# half 2, g 8), its bytes along K (step 4, half 2, t 4): even k in the low half, odd k in the high.


def _pack_data(packed: Tensor, tables: Tensor) -> Tensor:
    rows, columns = packed.shape[1] // TILE, 2 * packed.shape[2] // TILE
    tiles = packed.view(-1, rows, WARPS, 2, 8, columns, STEPS, 2, 4)
    # (matrix, row tile, warp, row half, g, K tile, step, K half, t)
    # -> (matrix, row tile, K tile, warp, g, t, step, K half, row half)
    pairs = tiles.permute(0, 1, 5, 2, 4, 8, 6, 7, 3).flatten(-2)
    words = _rearranged(pairs, tables)
    return words.view(torch.uint8).view(-1, rows, columns, WARPS, LANES, 16)


def _unpack_data(data: Tensor) -> Tensor:
    rows, columns = data.shape[1:3]
    words = _rearranged(
        data.view(-1, rows, columns, WARPS, 8, 4, STEPS, 4), _tables(_inverse(), data.device)
    )
    # (matrix, row tile, K tile, warp, g, t, step, K half, row half)
    tiles = words.unsqueeze(-1).view(torch.uint8).unflatten(-1, (2, 2))
    tiles = tiles.permute(0, 1, 3, 8, 4, 2, 6, 7, 5)
    return tiles.reshape(-1, rows * TILE, columns * TILE // 2)


def _rearranged(parts: Tensor, tables: Tensor) -> Tensor:
    """Int32 words from four bytes ``(..., 4)`` each, with bits rearranged by the tables."""
    words = torch.zeros(parts.shape[:-1], dtype=torch.int32, device=parts.device)
    for number, table in enumerate(tables):
        words |= table.index_select(0, parts[..., number].flatten().int()).view_as(words)
    return words


def _places() -> list[list[int]]:
    """Bit position in a stored word of each bit of four bytes of codes, lowest bit first."""
    return [
        [
            (target + half - by) % 32
            for half in (0, 16)  # even k, odd k
            for target, by in reversed(list(zip(TARGETS, rotations, strict=True)))
        ]
        for rotations in ROTATIONS
    ]


def _inverse() -> list[list[int]]:
    """Inverse of ``_places``: for each bit of a stored word, the bit of the 32 bits of codes."""
    of = {place: bit for bit, place in enumerate(chain(*_places()))}
    return [[of[bit] for bit in range(first, first + 8)] for first in range(0, 32, 8)]


def _tables(places: list[list[int]], device: torch.device) -> Tensor:
    """Bits of a word that come from each of four bytes, by byte value: int32 ``(4, 256)``."""
    values, tables = torch.arange(256), torch.zeros(4, 256, dtype=torch.int64)
    for table, of_byte in zip(tables, places, strict=True):
        for bit, place in enumerate(of_byte):
            table |= (values >> bit & 1) << place
    return tables.to(torch.int32).to(device)


def _pack_scales(stored: Tensor) -> Tensor:
    rows, columns = stored.shape[1] // TILE, stored.shape[2] // STEPS
    tiles = stored.view(-1, rows, WARPS, 2, 8, columns, 2, 2).int()
    # (matrix, row tile, warp, row half, g, K tile, word, step of it)
    # -> (matrix, row tile, K tile, warp, g, word, step of it, row half)
    scales = tiles.permute(0, 1, 5, 2, 4, 6, 7, 3)
    first, second = (scales[..., i, 0] | scales[..., i, 1] << 16 for i in range(2))
    words = first << SCALE_BIT | _turned(second << SCALE_BIT, 24)
    return words.contiguous().view(torch.uint8).view(-1, rows, columns, WARPS, 8, 8)


def _unpack_scales(scales: Tensor) -> Tensor:
    rows, columns = scales.shape[1:3]
    words = _words(scales.view(-1, rows, columns, WARPS, 8, 2, 4))
    places = (SCALE_BIT, SCALE_BIT + 16)
    stored = [word >> at & 0xFF for word in (words, _turned(words, 8)) for at in places]
    # (matrix, row tile, K tile, warp, g, word, step of it, row half)
    tiles = torch.stack(stored, dim=-1).unflatten(-1, (2, 2)).to(torch.uint8)
    return tiles.permute(0, 1, 3, 7, 4, 2, 5, 6).reshape(-1, rows * TILE, columns * STEPS)


def _turned(words: Tensor, by: int) -> Tensor:
    """Rotate int32 words left by ``by`` bits."""
    return words << by | words >> 32 - by & (1 << by) - 1


def _words(parts: Tensor) -> Tensor:
    wide = parts.int()
    return wide[..., 0] | wide[..., 1] << 8 | wide[..., 2] << 16 | wide[..., 3] << 24
