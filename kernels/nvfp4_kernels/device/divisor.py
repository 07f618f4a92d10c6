"""Correctly rounded division by one scale, without a branch."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Uint32

from nvfp4_kernels.device.math import rounded


@dataclass(frozen=True)
class Divisor:
    """KV-cache scale in [2^-126, 2^127), pre-split for exact branch-free division.

    An approximate quotient, off by at most two ulps, is corrected twice by its exact remainder; the
    second correction gives the correctly rounded quotient. This avoids the branch in each
    ``div.rn``.

    Attributes:
        unit: power of two with scale · unit = ``mantissa``.
        mantissa: mantissa in [1, 2).
        reciprocal: rounded reciprocal of ``mantissa``.
        limit: clamp of dividends, 512 · ``mantissa``, as greater dividends saturate.
    """

    unit: Float32
    mantissa: Float32
    reciprocal: Float32
    limit: Float32

    @staticmethod
    def of(scale: Float32) -> "Divisor":
        """Split a scale; call once per thread."""
        bits = scale.bitcast(Uint32)
        mantissa = Uint32(bits & 0x7FFFFF | 0x3F800000).bitcast(Float32)
        unit = Uint32(Uint32(254 << 23) - (bits & 0x7F800000)).bitcast(Float32)
        reciprocal = rounded("div", Float32(1.0), mantissa)
        return Divisor(unit, mantissa, reciprocal, mantissa * 512.0)

    def quotient(self, value: Float32) -> Float32:
        """``value`` divided by the scale, rounded to nearest even and clamped to ±512."""
        dividend = cute.arch.fmin(value * self.unit, self.limit, nan=True)
        dividend = cute.arch.fmax(dividend, -self.limit, nan=True)
        found = dividend * self.reciprocal
        for _ in range(2):
            remainder = cute.math.fma(-found, self.mantissa, dividend)
            found = cute.math.fma(remainder, self.reciprocal, found)
        # A remainder of zero makes a negative zero positive.
        sign = value.bitcast(Uint32) & Uint32(0x80000000)
        return Uint32(found.bitcast(Uint32) & Uint32(0x7FFFFFFF) | sign).bitcast(Float32)
