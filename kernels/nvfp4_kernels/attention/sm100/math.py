"""Arithmetic of the softmax on float32 values in registers, and their conversion to E4M3."""

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.attention.sm100.polynomials import EXP2
from nvfp4_kernels.device.math import exp2

LN_2 = 0.6931471805599453
EXP2_MIN = -127.0  # biased exponent 0, as of zero
EXP2_SHIFT = 1.5 * 2.0**23  # one ulp is 1; the low bits of the mantissa are 0
SUMS = 8  # of a row that are added to by turns: an addition takes four cycles
NEAREST = ptx.FPRoundingMode.RN


def exp2_mixed(values: list[Float32], emulated: int, degree: int) -> list[Float32]:
    """2^x of each value; FMA units emulate ``emulated`` of every 16, the MUFU computes the rest."""
    powers: list[Float32] = []
    for index in range(0, len(values), 2):
        pair = values[index : index + 2]
        powers += (
            _exp2_emulated(pair, degree)
            if _is_emulated(index, emulated)
            else [exp2(x) for x in pair]
        )
    return powers


def emulated_among(values: list[Float32], emulated: int) -> list[Float32]:
    """Values whose exponentials ``exp2_mixed`` emulates on FMA units."""
    return [value for index, value in enumerate(values) if _is_emulated(index, emulated)]


def _is_emulated(index: int, emulated: int) -> bool:
    return index // 2 * 2 % 16 < emulated


def _exp2_emulated(values: list[Float32], degree: int) -> list[Float32]:
    """2^x for x ≤ 128, as 2^n · 2^r with n the nearest integer; 0 for x ≤ -127.

    A constant whose last place has weight 1 is added, which leaves n in the low bits of the sum; an
    integer multiply-add shifts n from there into the exponent of 2^r.
    """
    low = [cute.arch.fmax(x, EXP2_MIN, nan=True) for x in values]
    pair = (low[0], low[1])
    shifted = ptx.add_packed_f32x2(pair, _both(EXP2_SHIFT), rnd=NEAREST)
    whole = ptx.add_packed_f32x2(shifted, _both(-EXP2_SHIFT), rnd=NEAREST)
    rest = ptx.fma_packed_f32x2(whole, _both(-1.0), pair, rnd=NEAREST)
    *lower, highest = EXP2[degree].coefficients
    found = _both(highest)
    for coefficient in reversed(lower):
        found = ptx.fma_packed_f32x2(found, rest, _both(coefficient), rnd=NEAREST)
    return [_add_exponent(*each) for each in zip(found, shifted, strict=True)]


def _add_exponent(value: Float32, exponent: Float32) -> Float32:
    """``value`` times 2^n, n in the low bits of ``exponent``, as one integer multiply-add."""
    return ptx.inline_ptx(
        "mad.lo.s32 {$w0}, {$r0}, 8388608, {$r1};",
        write_only_types=[Int32],
        read_only_args=[exponent.bitcast(Int32), value.bitcast(Int32)],
    ).bitcast(Float32)


def _both(value: float) -> tuple[Float32, Float32]:
    return Float32(value), Float32(value)


def log2(value: Float32) -> Float32:
    """Base-2 logarithm, with an error below 2^-22; −∞ for zero (PTX ISA, lg2.approx.ftz)."""
    return ptx.inline_ptx(
        "lg2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[value]
    )


def fmax_reduce(values: list[Float32]) -> Float32:
    """Maximum of the values, by a tree of three-input maxima (PTX ISA, max)."""
    while len(values) > 1:
        left = len(values) % 3
        threes = [
            ptx.inline_ptx(
                "max.f32 {$w0}, {$r0}, {$r1}, {$r2};",
                write_only_types=[Float32],
                read_only_args=values[first : first + 3],
            )
            for first in range(0, len(values) - 2, 3)
        ]
        rest = values[len(values) - left :] if left else []
        if not threes:
            return cute.arch.fmax(*rest)
        values = threes + rest
    return values[0]


def fadd_reduce(values: list[Float32]) -> Float32:
    """Sum of the values, whose number is a power of two, by packed additions."""
    while len(values) > 2:
        half = len(values) // 2
        values = _add_packed(values[:half], values[half:])
    return values[0] + values[1]


def add_folded(sums: list[Float32], values: list[Float32]) -> list[Float32]:
    """Add values to ``SUMS`` independent sums; an empty ``sums`` stands for zeros."""
    for first in range(0, len(values), SUMS):
        part = values[first : first + SUMS]
        sums = _add_packed(sums, part) if sums else part
    return sums


def _add_packed(left: list[Float32], right: list[Float32]) -> list[Float32]:
    out: list[Float32] = []
    for index in range(0, len(left), 2):
        a, b = left[index : index + 2], right[index : index + 2]
        out += ptx.add_packed_f32x2((a[0], a[1]), (b[0], b[1]), rnd=NEAREST)
    return out


def fma_packed(values: list[Float32], factor: Float32, addend: Float32) -> list[Float32]:
    """``value · factor + addend`` of each value, two at a time."""
    out: list[Float32] = []
    for pair in zip(values[::2], values[1::2], strict=True):
        out += ptx.fma_packed_f32x2(pair, (factor, factor), (addend, addend), rnd=NEAREST)
    return out


def mul_packed(values: list[Float32], factor: Float32) -> list[Float32]:
    """``value · factor`` of each value, two at a time."""
    out: list[Float32] = []
    for pair in zip(values[::2], values[1::2], strict=True):
        out += ptx.mul_packed_f32x2(pair, (factor, factor), rnd=NEAREST)
    return out


def to_e4m3(values: list[Float32]) -> list[Uint32]:
    """Convert to E4M3, to nearest even and saturating, packed in words of four codes."""
    convert = (
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0}; "
        "cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2}; mov.b32 {$w0}, {low, high}; }"
    )
    return [
        ptx.inline_ptx(convert, write_only_types=[Uint32], read_only_args=values[first : first + 4])
        for first in range(0, len(values), 4)
    ]
