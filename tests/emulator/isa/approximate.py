"""rcp, sqrt, rsqrt, sin, cos, lg2, ex2 and tanh (PTX ISA, Floating Point).

Hardware approximates; here every ``.approx`` result is correctly rounded, except for float64's own
errors. The bounds PTX gives for hardware: rcp 1 ulp; sqrt 2^-23 and rsqrt 2^-22.9 relative; sin and
cos 2^-20.5 absolute in [-2π, 2π]; lg2 2^-22; ex2 2 ulp; tanh 2^-11 relative; in f16 ex2 2^-9.9
relative and tanh 2^-10.987 absolute; in bf16 ex2 2^-7 relative and tanh 2^-8 absolute.
"""

import math
from fractions import Fraction
from typing import Any

import numpy as np

from tests.emulator.isa import exact
from tests.emulator.isa.counting import count_nonzero
from tests.emulator.isa.floating import ROUNDINGS, from_wide
from tests.emulator.isa.flush import canonical_f16, canonical_f32, flush_f32
from tests.emulator.isa.half import packed_form
from tests.emulator.isa.opcode import Opcode
from tests.emulator.isa.rounding import from_bf16, to_bf16
from tests.emulator.isa.semantics import Function, Lanes, Lanewise, check_count

_HALVES = ("f16", "f16x2", "bf16", "bf16x2")
_HIGH = np.uint64(0xFFFFFFFF00000000)
_SMALLEST_F64 = 2.0**-1022
_LEAST_EXPONENT = np.array(-126, np.float32)


def _reciprocal_root(values: Any) -> Lanes:
    result: Lanes = 1.0 / np.sqrt(values)
    return result


def _reciprocal(values: Any) -> Lanes:
    result: Lanes = 1.0 / values
    return result


_FUNCTIONS: dict[str, Function] = {
    "rcp": _reciprocal,
    "sqrt": np.sqrt,
    "rsqrt": _reciprocal_root,
    "sin": np.sin,
    "cos": np.cos,
    "lg2": np.log2,
    "ex2": np.exp2,
    "tanh": np.tanh,
}


def ex2_ftz(values: Any) -> Lanes:
    """ex2.approx.ftz.f32: results below 2^-126 are 0; a subnormal argument gives 1, as 0 does."""
    result: Lanes = np.exp2(values, dtype=np.float64).astype(np.float32)
    normal = values >= _LEAST_EXPONENT
    if count_nonzero(normal) == result.size:
        return result
    return canonical_f32(result * normal)


def _f32(op: Opcode, count: int | None, results: int | None) -> Lanewise:
    check_count(op.text, count, (1,), "source")
    name = op.family
    rounded = name in ("rcp", "sqrt")
    halves = _HALVES if name in ("ex2", "tanh") else ()
    doubles = ("f64",) if name in ("rcp", "sqrt", "rsqrt") else ()
    kind = op.type(("f32", *doubles, *halves))
    rounding = op.choice(("approx", *ROUNDINGS) if rounded else ("approx",))
    if kind == "f64":
        return _f64(op, name, rounding)
    if kind in _HALVES:
        return _half(op, name, kind)
    ftz = name != "tanh" and op.flag("ftz")
    op.finish()
    function = _FUNCTIONS[name]
    if name == "ex2" and ftz:
        return Lanewise(("f32",), ("f32",), ex2_ftz)
    if not ftz and rounding in ("rn", "approx") and name in ("rcp", "sqrt"):
        return Lanewise(("f32",), ("f32",), "1 / {0}" if name == "rcp" else "np.sqrt({0})")

    def wide(values: Any) -> Lanes:
        result: Lanes = function(np.asarray(values, np.float64))
        return result

    nearest = "rn" if rounding == "approx" else rounding
    return Lanewise(("f32",), ("f32",), from_wide(wide, nearest, ftz=ftz))


def _half(op: Opcode, name: str, kind: str) -> Lanewise:
    """Semantics of ex2 and tanh of halves; ex2 of bf16 exists only with .ftz."""
    function = _FUNCTIONS[name]
    if kind.startswith("f16"):
        op.finish()

        def run_f16(values: Any) -> Lanes:
            return canonical_f16(function(values.astype(np.float64)).astype(np.float16))

        return packed_form(kind, run_f16, 1)
    ftz = name == "ex2"
    if ftz:
        op.choice(("ftz",))
    op.finish()

    def run_bf16(patterns: Any) -> Lanes:
        values = from_bf16(patterns)
        found = function((flush_f32(values) if ftz else values).astype(np.float64))
        if ftz:
            found = found * ~(np.abs(found) < 2.0**-126)
        return to_bf16(found, "rn")

    return packed_form(kind, run_bf16, 1)


def _f64(op: Opcode, name: str, rounding: str) -> Lanewise:
    function = _FUNCTIONS[name]
    if rounding == "approx":
        gross = op.choice(("ftz",), "") if name == "rsqrt" else op.choice(("ftz",))
        if name == "sqrt":
            op.refuse("f64")
        op.finish()
        return Lanewise(("f64",), ("f64",), _gross(function) if gross else function)
    op.finish()
    if rounding == "rn":
        return Lanewise(("f64",), ("f64",), "1 / {0}" if name == "rcp" else "np.sqrt({0})")

    def special(value: float) -> float:
        with np.errstate(all="ignore"):
            return float(function(np.float64(value)))

    if name == "rcp":
        found = exact.lanes_of(lambda a: 1 / a if a else None, special, rounding)
    else:
        found = _directed_root(special, rounding)
    return Lanewise(("f64",), ("f64",), found)


def _directed_root(special: Function, rounding: str) -> Function:
    def single(value: float) -> float:
        if not math.isfinite(value) or value <= 0:
            result: float = special(value)
            return result
        return exact.square_root(Fraction(value), rounding)

    return lambda values: np.array([single(float(v)) for v in np.atleast_1d(values)], np.float64)


def _gross(function: Function) -> Function:
    """.approx.ftz.f64: reads and writes only the upper 32 bits (PTX ISA, rcp.approx.ftz.f64)."""

    def flush(values: Lanes) -> Lanes:
        result: Lanes = values * ~(np.abs(values) < _SMALLEST_F64)
        return result

    def run(values: Any) -> Lanes:
        upper = (np.atleast_1d(values).view(np.uint64) & _HIGH).view(np.float64)
        found = flush(function(flush(upper)))
        patterns = np.where(np.isnan(found), np.uint64(0x7FFFFFFF << 32), found.view(np.uint64))
        return (patterns & _HIGH).view(np.float64)

    return run


FAMILIES = dict.fromkeys(_FUNCTIONS, _f32)
