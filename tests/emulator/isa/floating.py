"""f32, f64 and f32x2 arithmetic (PTX ISA, Floating Point; Mixed Precision Floating Point)."""

import math
from fractions import Fraction
from typing import Any

import numpy as np

from tests.emulator.isa import exact
from tests.emulator.isa.counting import count_nonzero
from tests.emulator.isa.extreme import min_max
from tests.emulator.isa.flush import any_tiny, canonical_f32, clamp_unit, flush_f32
from tests.emulator.isa.opcode import Opcode
from tests.emulator.isa.rounding import flush_wide, from_bf16, to_f32, to_odd, two_sum
from tests.emulator.isa.semantics import (
    Function,
    Lanes,
    Lanewise,
    check_count,
    coerced,
    elementwise,
    spread,
)

ROUNDINGS = ("rn", "rz", "rm", "rp")
_LOW_BITS = np.array([0x0FFFFFFF], np.uint64)
# Arrays for 1 and for 2 values per lane: broadcasting is slower in numpy.
_LOW_28 = {size: np.repeat(_LOW_BITS, size) for size in (32, 64)}
_SIGN = {"add": "+", "sub": "-", "mul": "*", "div": "/"}


def fma_f32(a: Any, b: Any, c: Any) -> Lanes:
    """a·b + c rounded once to float32, to nearest."""
    double = np.float64
    product = a.astype(double) * b.astype(double)  # exact: 24 + 24 bits
    total = product + c.astype(double)
    # A second rounding errs only at midpoints, whose float64 patterns end in 28 zeros at least, as
    # those of infinities and NaN do.
    size = total.size
    if count_nonzero(total.view(np.uint64) & _LOW_28.get(size, _LOW_BITS)) == size:
        return total.astype(np.float32)
    if ((total - product == c) & (total - c == product)).all():  # exact sums
        return total.astype(np.float32)
    return canonical_f32(to_odd(*two_sum(product, c)).astype(np.float32))


def _wide_sum(a: Any, b: Any, rounding: str) -> Lanes:
    total, error = two_sum(np.asarray(a, np.float64), np.asarray(b, np.float64))
    odd = to_odd(total, error)
    if rounding != "rm":
        return odd
    # Exact sums of opposite values are -0 when rounding down (IEEE 754).
    cancelled = (odd == 0) & (np.signbit(a) != np.signbit(b))
    return np.where(cancelled, -0.0, odd)


def _wide(name: str, rounding: str) -> Function:
    """add, sub, mul, div or fma of float32 lanes in float64, exact or rounded to odd."""
    if name == "add":
        return lambda a, b: _wide_sum(a, b, rounding)
    if name == "sub":
        return lambda a, b: _wide_sum(a, -b, rounding)
    if name == "fma":
        return lambda a, b, c: _wide_sum(np.multiply(a, b, dtype=np.float64), c, rounding)
    # Products are exact in float64; an inexact quotient is not close to any float32 number.
    ufunc = np.multiply if name == "mul" else np.divide
    return lambda a, b: ufunc(a, b, dtype=np.float64)


def from_wide(wide: Function, rounding: str, *, ftz: bool, sat: bool = False) -> Function:
    """Semantics of a float32 instruction.

    Args:
        wide: function from float32 arguments to a float64 result, exact or rounded to odd.
        rounding: rounding of the float64 result to float32.
        ftz: whether ``.ftz`` flushes arguments and result.
        sat: whether ``.sat`` clamps the result.
    """

    def run(*values: Any) -> Lanes:
        found = wide(*map(flush_f32, values)) if ftz else wide(*values)
        if ftz:
            found = flush_wide(found, "f32", rounding)
        found = canonical_f32(to_f32(found, rounding))
        return clamp_unit(found) if sat else found

    return run


_NEAREST: dict[str, Function] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "fma": fma_f32,
}


def _flushing(nearest: Function, general: Function) -> Function:
    """Function that calls ``nearest`` if there is nothing to flush, else ``general``."""

    def run(*values: Any) -> Lanes:
        found: Lanes = nearest(*values)
        if any(map(any_tiny, values)) or any_tiny(found):
            found = general(*values)
        return found

    return run


def _f32(name: str, rounding: str, *, ftz: bool, sat: bool) -> Function:
    nearest = _NEAREST[name]
    if rounding != "rn" or ftz:
        general = from_wide(_wide(name, rounding), rounding, ftz=ftz, sat=sat)
        return general if rounding != "rn" or sat else _flushing(nearest, general)
    return (lambda *values: clamp_unit(nearest(*values))) if sat else nearest


def _packed_fma(a: Any, b: Any, c: Any) -> Lanes:
    """fma.rn.f32x2 of 64-bit words that hold two float32 each."""
    if a.__class__ is int:
        a = spread(a, np.uint64)
    if b.__class__ is int:
        b = spread(b, np.uint64)
    if c.__class__ is int:
        c = spread(c, np.uint64)
    f32 = np.float32
    return fma_f32(a.view(f32), b.view(f32), c.view(f32)).view(np.uint64)


def _packed_binary(name: str) -> Function:
    """Function for add, sub or mul .rn.f32x2."""
    ufunc = _NEAREST[name]

    def run(a: Any, b: Any) -> Lanes:
        if a.__class__ is int:
            a = spread(a, np.uint64)
        if b.__class__ is int:
            b = spread(b, np.uint64)
        result: Lanes = ufunc(a.view(np.float32), b.view(np.float32)).view(np.uint64)
        return result

    return run


def _arithmetic(op: Opcode, count: int | None, results: int | None) -> Lanewise:
    """Semantics of add, sub, mul, fma and mad of f32, f32x2 and f64."""
    fused = op.family in ("fma", "mad")
    name = "fma" if fused else op.family
    places = 3 if fused else 2
    check_count(op.text, count, (places,), "source")
    kind = op.type(("f32", "f32x2", "f64"))
    rounding = op.choice(ROUNDINGS, None if fused else "rn")
    if kind == "f64":
        op.finish()
        return _f64(name, rounding)
    ftz = op.flag("ftz")
    if kind == "f32x2":
        op.finish()
        if rounding == "rn" and not ftz:
            packed = _packed_fma if fused else _packed_binary(name)
        else:
            single = _f32(name, rounding, ftz=ftz, sat=False)
            packed = elementwise(single, np.uint64, np.float32)
        return Lanewise(("b64",) * places, ("b64",), packed)
    sat = op.flag("sat")
    op.finish()
    if rounding == "rn" and not fused and not ftz and not sat:
        return Lanewise(("f32", "f32"), ("f32",), f"{{0}} {_SIGN[name]} {{1}}")
    function = _f32(name, rounding, ftz=ftz, sat=sat)
    return Lanewise(("f32",) * places, ("f32",), function)


def _f64(name: str, rounding: str) -> Lanewise:
    places = 3 if name == "fma" else 2
    sources = ("f64",) * places
    if rounding == "rn" and name != "fma":
        return Lanewise(sources, ("f64",), f"{{0}} {_SIGN[name]} {{1}}")
    return Lanewise(sources, ("f64",), _exact_f64(name, rounding))


def _exact_f64(name: str, rounding: str) -> Function:
    def special(a: float, b: float, c: float = 0.0) -> float:
        x, y = np.float64(a), np.float64(b)
        if name in ("add", "sub"):
            return exact.zero_sum(a, b if name == "add" else -b, rounding)
        if name == "fma":
            with np.errstate(all="ignore"):
                product = float(x * y)
            if math.isinf(product) and math.isfinite(a) and math.isfinite(b):
                product = math.copysign(1.0, product)  # finite, hence c decides
            return exact.zero_sum(product, c, rounding)
        with np.errstate(all="ignore"):
            return float(x * y if name == "mul" else x / y)

    meanings: dict[str, Function] = {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "mul": lambda a, b: a * b,
        "div": lambda a, b: a / b if b else Fraction(0),
        "fma": lambda a, b, c: a * b + c,
    }
    return exact.lanes_of(meanings[name], special, rounding)


def _mixed(op: Opcode, count: int | None, results: int | None) -> Lanewise:
    """Semantics of add, sub and fma of f32 with f16 or bf16 operands (PTX ISA, Mixed Precision)."""
    fused = op.family == "fma"
    check_count(op.text, count, (3 if fused else 2,), "source")
    narrow = op.type(("f16", "bf16"))
    op.type(("f32",))
    rounding = op.choice(ROUNDINGS, None if fused else "rn")
    sat = op.flag("sat")
    op.finish()
    function = _f32(op.family, rounding, ftz=False, sat=sat)
    name = "f16" if narrow == "f16" else "b16"

    def wide(value: Any) -> Any:
        return value.astype(np.float32) if narrow == "f16" else from_bf16(value)

    def run(*values: Any) -> Lanes:
        result: Lanes = function(*map(wide, values[:-1]), values[-1])
        return result

    sources = (name, name, "f32") if fused else (name, "f32")
    return Lanewise(sources, ("f32",), coerced(run, sources))


def _div(op: Opcode, count: int | None, results: int | None) -> Lanewise:
    """Semantics of div; .full and .approx, within 2 ulp on hardware, are rounded correctly here."""
    check_count(op.text, count, (2,), "source")
    kind = op.type(("f32", "f64"))
    if kind == "f64":
        rounding = op.choice(ROUNDINGS)
        op.finish()
        return _f64("div", rounding)
    rounding = op.choice((*ROUNDINGS, "full", "approx"))
    ftz = op.flag("ftz")
    op.finish()
    if rounding == "approx":
        function = from_wide(_approximate_quotient, "rn", ftz=ftz)
        return Lanewise(("f32", "f32"), ("f32",), function)
    if rounding == "full":
        rounding = "rn"
    if rounding == "rn" and not ftz:
        return Lanewise(("f32", "f32"), ("f32",), "{0} / {1}")
    return Lanewise(("f32", "f32"), ("f32",), _f32("div", rounding, ftz=ftz, sat=False))


def _approximate_quotient(a: Any, b: Any) -> Lanes:
    """Quotient in which divisors above 2^126 count as infinite (PTX ISA, div.approx)."""
    quotient = np.divide(a, b, dtype=np.float64)
    return np.where(np.abs(b) > np.float32(2.0**126), a * np.copysign(np.float32(0), b), quotient)


def _sign(op: Opcode, count: int | None, results: int | None) -> Lanewise:
    """Semantics of abs and neg."""
    check_count(op.text, count, (1,), "source")
    kind = op.type(("f32", "f64"))
    template = "np.abs({0})" if op.family == "abs" else "-{0}"
    function = np.abs if op.family == "abs" else np.negative
    ftz = kind == "f32" and op.flag("ftz")
    op.finish()
    if ftz:
        return Lanewise((kind,), (kind,), lambda a: canonical_f32(function(flush_f32(a))))
    return Lanewise((kind,), (kind,), template)


def _copysign(op: Opcode, count: int | None, results: int | None) -> Lanewise:
    check_count(op.text, count, (2,), "source")
    kind = op.type(("f32", "f64"))
    op.finish()
    return Lanewise((kind, kind), (kind,), "np.copysign({1}, {0})")


_PROPERTIES = {
    "finite": "np.isfinite({0})",
    "infinite": "np.isinf({0})",
    "number": "~np.isnan({0})",
    "notanumber": "np.isnan({0})",
    "normal": "np.isfinite({0}) & ((np.abs({0}) >= TINY) | ({0} == 0))",
    "subnormal": "({0} != 0) & (np.abs({0}) < TINY)",
}


def _testp(op: Opcode, count: int | None, results: int | None) -> Lanewise:
    check_count(op.text, count, (1,), "source")
    kind = op.type(("f32", "f64"))
    template = _PROPERTIES[op.choice(_PROPERTIES)]
    op.finish()
    tiny = "np.float32(2.0**-126)" if kind == "f32" else "2.0**-1022"
    return Lanewise((kind,), ("pred",), template.replace("TINY", tiny))


def _extreme(op: Opcode, count: int | None, results: int | None) -> Lanewise:
    return min_max(op, count, op.type(("f32", "f64")))


FAMILIES = {
    "add": _arithmetic,
    "sub": _arithmetic,
    "mul": _arithmetic,
    "fma": _arithmetic,
    "mad": _arithmetic,
    "div": _div,
    "abs": _sign,
    "neg": _sign,
    "min": _extreme,
    "max": _extreme,
    "copysign": _copysign,
    "testp": _testp,
}
MIXED = {"add": _mixed, "sub": _mixed, "fma": _mixed}
