"""Rounding of float64 values to narrower formats, by every rounding mode of cvt and arithmetic."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tests.emulator.isa.counting import count_nonzero
from tests.emulator.isa.semantics import Lanes

F64 = npt.NDArray[np.float64]


def _away(values: F64) -> F64:
    return np.copysign(np.floor(np.abs(values) + 0.5), values)


# Integral rounding of each modifier (PTX ISA, Rounding Modifiers).
INTEGRAL: dict[str, Callable[[F64], F64]] = {
    "rn": np.rint,
    "rz": np.trunc,
    "rm": np.floor,
    "rp": np.ceil,
    "rna": _away,
}


@dataclass(frozen=True)
class Format:
    """A binary floating-point format.

    Attributes:
        exponent: bits of the exponent.
        mantissa: stored bits of the mantissa.
        largest: greatest finite magnitude.
        infinite: whether the format has infinities.
        nan: encoding of the canonical NaN; the largest magnitude in a format without NaN.
    """

    exponent: int
    mantissa: int
    largest: float
    infinite: bool
    nan: int

    @property
    def bias(self) -> int:
        return (1 << (self.exponent - 1)) - 1


FORMATS = {
    "f32": Format(8, 23, 2.0**128 - 2.0**104, True, 0x7FFFFFFF),
    "tf32": Format(8, 10, 2.0**128 - 2.0**117, True, 0x7FFFFFFF >> 13),
    "f16": Format(5, 10, 65504.0, True, 0x7FFF),
    "bf16": Format(8, 7, 2.0**128 - 2.0**120, True, 0x7FFF),
    "e4m3": Format(4, 3, 448.0, False, 0x7F),
    "e5m2": Format(5, 2, 57344.0, True, 0x7F),
    "e2m1": Format(2, 1, 6.0, False, 0x7),
    "e2m3": Format(2, 3, 7.5, False, 0x1F),
    "e3m2": Format(3, 2, 28.0, False, 0x1F),
}


def quantum(values: F64, form: Format) -> npt.NDArray[np.int32]:
    """Exponent of the distance between representable numbers at each value."""
    exponents: npt.NDArray[np.int32] = np.frexp(values)[1]
    result: npt.NDArray[np.int32] = np.maximum(exponents - 1, 1 - form.bias) - form.mantissa
    return result


def rounded(values: Lanes, form: Format, rounding: str) -> F64:
    """Each value rounded to a number of the format, overflow included.

    Args:
        values: float64, exact or rounded to odd.
        form: target format.
        rounding: a key of ``INTEGRAL``.
    """
    step = quantum(values, form)
    result = np.ldexp(INTEGRAL[rounding](np.ldexp(values, -step)), step)
    return overflowed(result, values, form, rounding)


def overflowed(result: F64, values: F64, form: Format, rounding: str) -> F64:
    """Results with overflow resolved: infinite, or the largest number when rounding inwards."""
    beyond = (np.abs(result) > form.largest) & np.isfinite(values)
    if not beyond.any():
        return result
    inwards = {"rz": values == values, "rm": values > 0, "rp": values < 0}.get(rounding)
    limit = np.inf if inwards is None else np.where(inwards, form.largest, np.inf)
    return np.where(beyond, np.copysign(limit, values), result)


def two_sum(a: Lanes, b: Lanes) -> tuple[F64, F64]:
    """float64 sum of each pair and its rounding error."""
    total = a + b
    second = total - a
    return total, (a - (total - second)) + (b - second)


def to_odd(total: F64, error: F64) -> F64:
    """Sum ``total`` rounded to odd if ``error`` is not 0, so that a second rounding is correct."""
    inexact = (error != 0) & np.isfinite(total) & (total.view(np.uint64) & 1 == 0)
    toward = np.where(error > 0, np.inf, -np.inf)
    return np.where(inexact, np.nextafter(total, toward), total)


def to_f32(values: Lanes, rounding: str) -> npt.NDArray[np.float32]:
    """float64 values, exact or rounded to odd, as float32."""
    if rounding == "rn":
        return values.astype(np.float32)
    return rounded(values, FORMATS["f32"], rounding).astype(np.float32)


def to_f16(values: Lanes, rounding: str) -> npt.NDArray[np.float16]:
    """float64 or float32 values as float16."""
    if rounding == "rn":
        return values.astype(np.float16)
    return rounded(values.astype(np.float64), FORMATS["f16"], rounding).astype(np.float16)


def flush_wide(values: Lanes, kind: str, rounding: str) -> Lanes:
    """Results in float64 with the subnormals of f32 or f16 flushed to zero.

    Hardware decides after rounding, but before limiting the exponent (seen on sm_90): a value that
    rounds to the smallest normal number at full precision stays.
    """
    smallest, scale, close = _NORMAL[kind]
    small = np.abs(values) < smallest
    if not count_nonzero(small):
        return values
    tiny = small & (np.abs(close(values * scale, rounding)) < smallest * scale)
    return values * ~tiny


_NORMAL: dict[str, tuple[float, float, Callable[[Lanes, str], Lanes]]] = {
    "f32": (2.0**-126, 2.0**64, to_f32),
    "f16": (2.0**-14, 2.0**12, to_f16),
}


def to_bf16(values: Lanes, rounding: str) -> npt.NDArray[np.uint16]:
    """bfloat16 patterns of float32 or float64 values; NaN becomes canonical."""
    return np.where(np.isnan(values), np.uint16(0x7FFF), cut_to_bf16(values, rounding))


def cut_to_bf16(values: Lanes, rounding: str) -> npt.NDArray[np.uint16]:
    """bfloat16 patterns of float32 values; NaN keeps its upper bits, unlike in ``to_bf16``."""
    exact = rounded(values, FORMATS["bf16"], rounding).astype(np.float32)
    return (exact.view(np.uint32) >> 16).astype(np.uint16)


def from_bf16(patterns: Lanes) -> npt.NDArray[np.float32]:
    """bfloat16 patterns as float32."""
    values: npt.NDArray[np.float32] = patterns.view(ml_dtypes.bfloat16).astype(np.float32)
    return values


def encode(numbers: F64, form: Format) -> npt.NDArray[np.uint32]:
    """Bit patterns of values exact in the format; NaN becomes canonical."""
    magnitude = np.abs(np.where(np.isfinite(numbers), numbers, 0.0))
    # Zero and subnormal numbers share the step of the smallest normal number.
    step = quantum(np.maximum(magnitude, 2.0 ** (1 - form.bias)), form)
    # Adding the biased exponent carries the implicit leading bit of a normal mantissa.
    biased = step + form.mantissa + form.bias - 1
    patterns = np.ldexp(magnitude, -step).astype(np.int64) + (biased << form.mantissa)
    top = ((1 << form.exponent) - 1) << form.mantissa
    patterns = np.where(np.isinf(numbers), top, patterns)
    patterns |= np.signbit(numbers).astype(np.int64) << (form.exponent + form.mantissa)
    return np.where(np.isnan(numbers), form.nan, patterns).astype(np.uint32)


@cache
def decoded(name: str) -> npt.NDArray[np.float64]:
    """Value of every pattern of a narrow format (up to 8 bits)."""
    form = FORMATS[name]
    magnitudes = np.arange(1 << (form.exponent + form.mantissa))
    field = magnitudes >> form.mantissa
    fraction = magnitudes & ((1 << form.mantissa) - 1)
    leading = np.where(field > 0, 1 << form.mantissa, 0)
    step = np.maximum(field, 1) - form.bias - form.mantissa
    values = np.ldexp((leading + fraction).astype(np.float64), step)
    if form.infinite:
        top = (1 << form.exponent) - 1
        values[field == top] = np.nan
        values[top << form.mantissa] = np.inf
    elif name == "e4m3":
        values[form.nan] = np.nan
    return np.concatenate([values, -values])
