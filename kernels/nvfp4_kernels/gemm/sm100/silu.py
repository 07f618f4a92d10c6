"""SiLU of several float32 values at a time, with the packed arithmetic of sm_100.

SiLU is bound by MUFU. Up to four values share one reciprocal, of the product of their denominators:
five MUFU instructions for four values instead of eight. Below ``_LEAST_SILU``, where that product
might overflow, |SiLU| is under 1.1e-8, and x is clamped. NaN is kept out of the denominators, so
that it does not spread to the other values. ``silu_powers`` ends with a MUFU instruction, whose
latency is hidden if the next values' powers are issued before ``silu`` of the current values.
"""

import cutlass.cute as cute
from cutlass import Float32
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.device.math import LOG2_E

_LEAST_SILU = -21.4  # e^21.4 is just below 2^31: four denominators' product is below 2^124
_NEAREST = ptx.FPRoundingMode.RN


def silu_powers(values: list[Float32]) -> list[Float32]:
    """Powers e^-x of an even number of values, with x clamped to ≥ ``_LEAST_SILU``."""
    held = [cute.arch.fmax(x, _LEAST_SILU) for x in values]
    exponents = multiplied(held, [Float32(-LOG2_E)] * len(held))
    return [cute.math.exp2(exponent, fastmath=True) for exponent in exponents]


def silu(values: list[Float32], powers: list[Float32]) -> list[Float32]:
    """SiLU of an even number of values, given their ``silu_powers``."""
    denominators: list[Float32] = []
    for pair in zip(powers[::2], powers[1::2], strict=True):
        denominators += ptx.add_packed_f32x2(pair, (Float32(1.0), Float32(1.0)), rnd=_NEAREST)
    reciprocals: list[Float32] = []
    for first in range(0, len(values), 4):
        reciprocals += _reciprocals(denominators[first : first + 4])
    return multiplied([_held_or_nan(x) for x in values], reciprocals)


def _held_or_nan(x: Float32) -> Float32:
    """Maximum of x and ``_LEAST_SILU``; NaN stays NaN (PTX ISA, max)."""
    return ptx.inline_ptx(
        "max.NaN.f32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Float32],
        read_only_args=[x, Float32(_LEAST_SILU)],
    )


def _reciprocals(values: list[Float32]) -> list[Float32]:
    """Reciprocals of two or four values from the reciprocal of their product."""
    if len(values) == 2:
        reciprocal = cute.arch.rcp_approx(values[0] * values[1])
        return multiplied([reciprocal] * 2, values[::-1])
    a, b, c, d = values
    ab, cd = multiplied([a, c], [b, d])
    reciprocal = cute.arch.rcp_approx(ab * cd)
    of_ab, of_cd = multiplied([reciprocal] * 2, [cd, ab])
    return multiplied([of_ab, of_ab, of_cd, of_cd], [b, a, d, c])


def multiplied(left: list[Float32], right: list[Float32]) -> list[Float32]:
    """Element-wise products of two lists, by packed multiplications of two values each."""
    found: list[Float32] = []
    for at in range(0, len(left) - 1, 2):
        x, y = left[at : at + 2], right[at : at + 2]
        found += ptx.mul_packed_f32x2((x[0], x[1]), (y[0], y[1]), rnd=_NEAREST)
    return found if len(left) % 2 == 0 else [*found, left[-1] * right[-1]]
