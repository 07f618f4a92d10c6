"""Flushing of subnormal numbers, clamping and canonical NaN."""

from typing import Any

import numpy as np

from tests.emulator.isa.counting import count_nonzero
from tests.emulator.isa.semantics import Lanes

_SMALLEST_F32 = np.float32(2.0**-126)
_SMALLEST_F16 = np.float16(2.0**-14)
NAN_F32 = np.uint32(0x7FFFFFFF).view(np.float32)
NAN_F16 = np.uint16(0x7FFF).view(np.float16)


def flush_f32(values: Any) -> Any:
    """Subnormal float32 values as zeros of the same sign; all other values unchanged."""
    return values * (np.abs(values) >= _SMALLEST_F32)


def any_tiny(values: Any) -> bool:
    """Whether any float32 value is subnormal, or the least normal number (a rounded subnormal)."""
    tiny = count_nonzero(np.abs(values) <= _SMALLEST_F32)
    return bool(tiny) and tiny + count_nonzero(values) != values.size


def flush_f16(values: Any) -> Any:
    """Subnormal float16 values as zeros of the same sign; all other values unchanged."""
    return values * (np.abs(values) >= _SMALLEST_F16)


def clamp_unit(values: Any) -> Any:
    """``.sat``: clamp to [0, 1], where NaN and both zeros give +0."""
    return np.fmin(np.fmax(values, 0), 1) + 0


def relu(values: Any) -> Any:
    """``.relu``: negative values become +0; NaN stays."""
    return np.maximum(values, 0) + 0


def canonical_f16(values: Lanes) -> Lanes:
    """float16 values with every NaN canonical."""
    missing = values != values
    return np.where(missing, NAN_F16, values) if count_nonzero(missing) else values


def canonical_f32(values: Lanes) -> Lanes:
    """float32 values with every NaN canonical."""
    missing = values != values
    return np.where(missing, NAN_F32, values) if count_nonzero(missing) else values
