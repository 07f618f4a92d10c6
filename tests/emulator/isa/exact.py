"""Directed or fused float64 arithmetic, lane by lane over fractions: slow, but rarely needed."""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from tests.emulator.isa.semantics import Lanes

_LARGEST = math.ldexp((1 << 53) - 1, 971)


def nearest_integer(value: Fraction, rounding: str) -> int:
    """Integer that a fraction rounds to, by rn, rz, rm or rp."""
    if rounding == "rn":
        return round(value)  # ties to even
    if rounding == "rz":
        return math.trunc(value)
    return math.floor(value) if rounding == "rm" else math.ceil(value)


def to_double(value: Fraction, rounding: str) -> float:
    """The float64 that a nonzero fraction rounds to."""
    exponent = abs(value.numerator).bit_length() - value.denominator.bit_length()
    if abs(value) < Fraction(2) ** exponent:
        exponent -= 1
    step = max(exponent, -1022) - 52
    integer = nearest_integer(value / Fraction(2) ** step, rounding)
    sign = 1.0 if value > 0 else -1.0
    if integer == 0:
        return 0.0 * sign
    if abs(integer) * Fraction(2) ** step > Fraction(_LARGEST):
        inwards = rounding == "rz" or rounding == ("rm" if value > 0 else "rp")
        return sign * (_LARGEST if inwards else math.inf)
    return math.ldexp(integer, step)


def lanes_of(
    exact: Callable[..., Fraction | None],
    otherwise: Callable[..., float],
    rounding: str,
) -> Callable[..., Lanes]:
    """Lane-wise float64 function, made from its exact definition.

    Args:
        exact: function of fractions; None where there is no finite nonzero value.
        otherwise: function of floats, for lanes with special values or without an exact nonzero
            result.
        rounding: rn, rz, rm or rp.
    """

    def single(*values: float) -> float:
        if all(math.isfinite(value) for value in values):
            result = exact(*map(Fraction, values))
            if result:
                return to_double(result, rounding)
        return otherwise(*values)

    def run(*values: Any) -> Lanes:
        lanes = np.broadcast(*values)
        return np.array([single(*map(float, lane)) for lane in lanes], np.float64)

    return run


def zero_sum(a: float, b: float, rounding: str) -> float:
    """Sum of two floats that is zero, infinite or NaN; opposites cancel to -0 only under rm."""
    total = float(np.float64(a) + np.float64(b))
    if total == 0 and rounding == "rm" and math.copysign(1, a) != math.copysign(1, b):
        return -0.0
    return total


def square_root(value: Fraction, rounding: str) -> float:
    """float64 square root of a positive fraction, rounded as ``rounding`` says."""
    # Scaled by an even power so that the integer root has 64 bits; a remainder makes it odd.
    bits = value.numerator.bit_length() - value.denominator.bit_length()
    shift = (140 - bits) // 2 * 2
    scaled = value * Fraction(2) ** shift
    root = math.isqrt(math.floor(scaled))
    inexact = root * root != scaled
    return to_double(Fraction(2 * root + inexact, 2) / Fraction(2) ** (shift // 2), rounding)
