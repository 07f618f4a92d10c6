"""Quantisation of an NVFP4 block in registers, bit-identical to ``terms.quantize_terms``.

Every operation rounds to nearest even and keeps subnormal numbers, as torch does on CPU.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.device.widen import widen
from nvfp4_kernels.formats.nvfp4 import (
    ATOM_COLS,
    ATOM_ROWS,
    E2M1_MAX,
    E4M3_TINY,
    GLOBAL_RANGE,
    SMALLEST_ROW_SCALE,
)


@dataclass(frozen=True)
class GlobalScale:
    """Reciprocals that the quantisation formula uses instead of the global scale.

    Attributes:
        inverse: 1 / scale.
        unit: 1 / inverse, which rounding may make unequal to the scale.
    """

    inverse: Float32
    unit: Float32


@dataclass(frozen=True)
class Block:
    """A quantised block.

    Attributes:
        codes: 16 E2M1 codes in two words, the first code in the lowest bits.
        scale: E4M3 bits of the block scale.
        step: value of E2M1's 1.0 in the block.
    """

    codes: Vector
    scale: Uint8
    step: Float32


@dataclass(frozen=True)
class BlockScale:
    """Scale of a block, in the forms that quantisation uses.

    Attributes:
        bits: bits of the E4M3 scale.
        step: value of E2M1's 1.0 in the block.
        multiplier: factor that brings elements into E2M1's range.
    """

    bits: Uint8
    step: Float32
    multiplier: Float32


def global_scale(scale: Float32) -> GlobalScale:
    """Compute both reciprocals of a global scale; call once per thread."""
    inverse = 1.0 / scale
    return GlobalScale(inverse, 1.0 / inverse)


def row_scale(amax: Float32) -> Float32:
    """Global scale of a row as in ``nvfp4.row_global_scales``; 1 if ``amax`` is 0 or NaN."""
    scale = cute.arch.fmax(amax / Float32(GLOBAL_RANGE), SMALLEST_ROW_SCALE)
    return cutlass.select_(amax > 0.0, scale, Float32(1.0))


def amax(elements: Vector) -> Float32:
    """Largest magnitude of 16 elements; NaN if any element is NaN."""
    found = [cute.math.abs(value) for value in widen(elements).to_elements()]
    while len(found) > 1:
        pairs = zip(found[::2], found[1::2], strict=True)
        found = [cute.arch.fmax(a, b, nan=True) for a, b in pairs]
    return found[0]


def quantize(
    values: Vector, largest: Float32, scale: GlobalScale, smallest_scale: float = 0.0
) -> Block:
    """Quantise a block: ``values`` float32 (16,), whose ``amax`` is ``largest``.

    ``smallest_scale``: lower bound of a nonzero block's scale; 0: no bound.
    """
    shared = block_scale(largest, scale, smallest_scale)
    return Block(to_e2m1(values * shared.multiplier), shared.bits, shared.step)


def quantize_terms(values: Vector, largest: Float32, scale: GlobalScale, terms: int) -> list[Block]:
    """Quantise ``values`` float32 (16,), then each remainder, to ``terms`` terms in all."""
    blocks = [quantize(values, largest, scale)]
    while len(blocks) < terms:
        values = _left(values, blocks[-1])
        blocks.append(quantize(values, amax(values), scale, E4M3_TINY))
    return blocks


def _left(values: Vector, block: Block) -> Vector:
    """Remainder: ``values`` minus the block's dequantised values, each difference rounded once."""
    codes = _from_e2m1(block.codes)
    step = -block.step
    left = [cute.math.fma(codes[n], step, values[n]) for n in range(len(codes))]
    return Vector.from_elements(tuple(left), Float32)


def block_scale(largest: Float32, scale: GlobalScale, smallest_scale: float = 0.0) -> BlockScale:
    """Scale of a block whose ``amax`` is ``largest``; ``smallest_scale``: see ``quantize``."""
    exact = scale.inverse * (largest * Float32(1.0 / E2M1_MAX))
    if smallest_scale:
        least = cute.arch.fmax(exact, smallest_scale, nan=True)
        exact = cutlass.select_(largest == 0.0, Float32(0.0), least)
    pair = ptx.inline_ptx(
        "cvt.rn.satfinite.e4m3x2.f32 {$w0}, 0f00000000, {$r0};",
        write_only_types=[cutlass.Uint16],
        read_only_args=[exact],
    )
    step = _e4m3_to_float(pair) * scale.unit
    # A zero scale must give zeros, not 0/0.
    multiplier = Float32(cutlass.select_(step == 0.0, Float32(0.0), 1.0 / step))
    return BlockScale(pair.to(Uint8), step, multiplier)


def _e4m3_to_float(pair: cutlass.Uint16) -> Float32:
    """Value of the lower of two packed E4M3 numbers."""
    return ptx.inline_ptx(
        "{ .reg .b32 both; .reg .b16 low, high; cvt.rn.f16x2.e4m3x2 both, {$r0}; "
        "mov.b32 {low, high}, both; cvt.f32.f16 {$w0}, low; }",
        write_only_types=[Float32],
        read_only_args=[pair],
    )


def to_e2m1(scaled: Vector) -> Vector:
    """Round 16 float32 to E2M1, nearest even, saturating; return two words of eight codes."""
    # One asm per word: ptxas then converts straight into the word's bytes.
    convert = " ".join(
        f"cvt.rn.satfinite.e2m1x2.f32 b{n}, {{$r{2 * n + 1}}}, {{$r{2 * n}}};" for n in range(4)
    )
    word = "{ .reg .b8 b0, b1, b2, b3; " + convert + " mov.b32 {$w0}, {b0, b1, b2, b3}; }"
    words = [
        ptx.inline_ptx(
            word,
            write_only_types=[Uint32],
            read_only_args=[scaled[first + n] for n in range(8)],
        )
        for first in (0, 8)
    ]
    return Vector.from_elements(tuple(words), Uint32)


def _from_e2m1(codes: Vector) -> list[Float32]:
    """Float32 values of 16 E2M1 codes in two words."""
    convert = " ".join(
        f"cvt.rn.f16x2.e2m1x2 pair, b{n}; mov.b32 {{low, high}}, pair; "
        f"cvt.f32.f16 {{$w{2 * n}}}, low; cvt.f32.f16 {{$w{2 * n + 1}}}, high;"
        for n in range(4)
    )
    word = (
        "{ .reg .b8 b0, b1, b2, b3; .reg .b32 pair; .reg .b16 low, high; "
        "mov.b32 {b0, b1, b2, b3}, {$r0}; " + convert + " }"
    )
    values: list[Float32] = []
    for n in range(2):
        values += ptx.inline_ptx(word, write_only_types=[Float32] * 8, read_only_args=[codes[n]])
    return values


def scale_offset(row: Int32, block: Int32, across: Int32) -> Int64:
    """Byte offset of a block's scale in the blocked layout (see ``formats.nvfp4``).

    Args:
        row: index of the row in the matrix.
        block: index of the block in the row.
        across: number of atoms along a row, ceil(K/64).
    """
    atom, quarter = Int64(row // ATOM_ROWS) * across + block // ATOM_COLS, ATOM_ROWS // 4
    line = row % quarter * (4 * ATOM_COLS) + row % ATOM_ROWS // quarter * ATOM_COLS
    return atom * (ATOM_ROWS * ATOM_COLS) + line + block % ATOM_COLS
