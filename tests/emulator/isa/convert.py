"""cvt between scalar integer and floating-point types, and cvt.pack (PTX ISA, cvt)."""

from fractions import Fraction
from typing import Any

import numpy as np

from tests.emulator.isa import exact, narrow
from tests.emulator.isa.counting import count_nonzero
from tests.emulator.isa.flush import (
    canonical_f16,
    canonical_f32,
    clamp_unit,
    flush_f32,
    relu,
)
from tests.emulator.isa.opcode import Opcode
from tests.emulator.isa.rounding import (
    FORMATS,
    INTEGRAL,
    cut_to_bf16,
    flush_wide,
    from_bf16,
    to_bf16,
    to_f16,
    to_f32,
)
from tests.emulator.isa.semantics import (
    DTYPES,
    Function,
    Lanes,
    Lanewise,
    check_count,
    coerced,
    mask,
    signed,
)

_INTEGERS = tuple(f"{sign}{bits}" for sign in "us" for bits in (8, 16, 32, 64))
_FLOATS = ("f16", "bf16", "f32", "f64")
_ROUNDINGS = ("rn", "rz", "rm", "rp")
_INTEGRAL = ("rni", "rzi", "rmi", "rpi")
_NAME = {"f16": "f16", "bf16": "b16", "f32": "f32", "f64": "f64"}
# Significand bits and exponent range, to tell narrowing from widening.
_PRECISION = {"f16": (11, 5), "bf16": (8, 8), "f32": (24, 8), "f64": (53, 11)}
# f16 patterns to f32, with canonical NaN.
_F16_VALUES = canonical_f32(np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32))


def _range(kind: str) -> tuple[int, int]:
    bits = int(kind[1:])
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if kind[0] == "s" else (0, (1 << bits) - 1)


def _convert(op: Opcode, count: int | None, results: int | None) -> Lanewise:
    if op.flag("pack"):
        return _pack(op, count)
    source = op.type((*_INTEGERS, *_FLOATS, *narrow.SOURCES))
    target = op.type((*_INTEGERS, *_FLOATS, *narrow.TARGETS))
    if source in narrow.SOURCES or target in narrow.TARGETS:
        return narrow.convert(op, target, source, count)
    check_count(op.text, count, (1,), "source")
    if source in _INTEGERS:
        if target in _INTEGERS:
            return _between_integers(op, target, source)
        return _from_integer(op, target, source)
    if target in _INTEGERS:
        return _to_integer(op, target, source)
    return _between_floats(op, target, source)


def _between_integers(op: Opcode, target: str, source: str) -> Lanewise:
    low, high = _range(target)
    own_low, own_high = _range(source)
    bits, own_bits = int(target[1:]), int(source[1:])
    saturates = own_low < low or own_high > high
    sat = saturates and op.flag("sat")
    op.finish()
    number = signed(0, own_bits) if source[0] == "s" else "{0}"
    if sat:
        low, high = max(low, own_low), min(high, own_high)
        vector = f"np.clip({{0}}, {low}, {high}).astype(np.{DTYPES[target].__name__})"
        scalar = f"max({low}, min({high}, {number})) & {mask(bits)}"
        return Lanewise((source,), (target,), vector, scalar)
    if bits == own_bits:
        return Lanewise((target,), (target,), "{0}", "{0}")
    vector = f"{{0}}.astype(np.{DTYPES[target].__name__})"
    if source[0] == "u" and bits > own_bits:
        return Lanewise((source,), (target,), vector, "{0}")
    return Lanewise((source,), (target,), vector, f"{number} & {mask(bits)}")


def _odd_double(values: Lanes) -> Lanes:
    """Integers as float64, rounded to odd if longer than 53 bits."""
    if values.dtype.itemsize < 8:
        return values.astype(np.float64)
    magnitude = np.abs(values).view(np.uint64)
    sticky = (magnitude >> 11) | (magnitude & 0x7FF != 0)
    large = np.ldexp(sticky.astype(np.float64), 11)
    result = np.where(magnitude >> 53 != 0, large, magnitude.astype(np.float64))
    return np.where(values < 0, -result, result)


def _from_integer(op: Opcode, target: str, source: str) -> Lanewise:
    rounding = op.choice(_ROUNDINGS)
    sat = target != "bf16" and op.flag("sat")
    if target == "f32" or source == "f32":
        op.flag("ftz")  # integers have no subnormal values
    op.finish()
    if rounding == "rn" and target != "bf16" and not sat:
        vector = f"{{0}}.astype(np.{DTYPES[target].__name__})"
        return Lanewise((source,), (target,), vector)
    if target == "f64" and source[1:] == "64":
        function: Function = _integers_to_f64(rounding)
    elif target == "f64":
        function = _odd_double
    else:
        close = _closed(target, rounding)
        function = lambda values: close(_odd_double(values))  # noqa: E731
    if sat:
        return Lanewise((source,), (target,), lambda values: clamp_unit(function(values)))
    return Lanewise((source,), (_NAME[target],), function)


def _integers_to_f64(rounding: str) -> Function:
    def single(value: int) -> float:
        return exact.to_double(Fraction(value), rounding) if value else 0.0

    return lambda values: np.array([single(int(v)) for v in values], np.float64)


def _opened(kind: str) -> Function:
    """Conversion of presented values to float64."""
    if kind == "bf16":
        return lambda values: from_bf16(values).astype(np.float64)
    if kind == "f16":  # the detour through float32 makes signalling NaN quiet
        return lambda values: values.astype(np.float32).astype(np.float64)
    return lambda values: values.astype(np.float64) * 1.0  # the product quiets NaN, too


def _closed(kind: str, rounding: str, *, keeps_nan: bool = False) -> Function:
    """Conversion from float64, exact or rounded to odd, to values or bit patterns of ``kind``.

    NaN becomes canonical, or keeps its upper bits if ``keeps_nan`` (float64 sources).
    """
    narrower: dict[str, Function] = {"f32": to_f32, "f16": to_f16, "bf16": to_bf16}
    canonical: Function = {"f32": canonical_f32, "f16": canonical_f16}.get(kind, np.asarray)
    if kind == "f64":
        return lambda values: values
    if keeps_nan:
        canonical, narrower["bf16"] = np.asarray, cut_to_bf16
    close = narrower[kind]
    return lambda values: canonical(close(values, rounding))


def _to_integer(op: Opcode, target: str, source: str) -> Lanewise:
    """Saturating conversion; the result for NaN depends on the types (PTX ISA, cvt)."""
    integral = INTEGRAL[op.choice(_INTEGRAL)[:2]]
    ftz = source == "f32" and op.flag("ftz")
    op.flag("sat")  # saturation is the default
    op.finish()
    low, high = _range(target)
    dtype = DTYPES[target]
    bits = int(target[1:])
    missing = 0
    if source == "f64" or bits == 64:
        missing = low if target[0] == "s" else 1 << (bits - 1)
    # No float equals 2^63 - 1: a value not below the power of two above ``high`` becomes ``high``.
    above = float(high + 1)
    wide: dict[str, Function] = {"f16": lambda v: v.astype(np.float32), "bf16": from_bf16}
    opened = wide.get(source, np.asarray)

    def run(values: Any) -> Lanes:
        if ftz:
            values = flush_f32(values)
        found = integral(opened(values))
        inside = (found >= float(low)) & (found < above)
        if count_nonzero(inside) == inside.size:
            converted: Lanes = found.astype(dtype)
            return converted
        integers = np.where(inside, found, 0).astype(dtype)
        outside = np.where(
            np.isnan(found), dtype(missing), np.where(found < 0, dtype(low), dtype(high))
        )
        return np.where(inside, integers, outside)

    return Lanewise((_NAME[source],), (target,), run)


def _between_floats(op: Opcode, target: str, source: str) -> Lanewise:
    if target == source and any(part in _INTEGRAL for part in op.parts):
        return _integral_float(op, target)
    (bits, exponent), (own_bits, own_exponent) = _PRECISION[target], _PRECISION[source]
    exactly = bits >= own_bits and exponent >= own_exponent
    rounding = op.choice(_ROUNDINGS, "rn" if exactly else None)
    ftz = "f32" in (target, source) and op.flag("ftz")
    sat = target != "bf16" and op.flag("sat")
    from_f32 = source == "f32" and target in ("f16", "bf16") and rounding in ("rn", "rz")
    negative_to_zero = from_f32 and op.flag("relu")
    finite = from_f32 and op.flag("satfinite")
    op.finish()
    plain = not (ftz or sat or negative_to_zero or finite)
    if plain and (target, source) in _DIRECT and rounding == "rn":
        return _DIRECT[target, source]
    opened, closed = _opened(source), _closed(target, rounding, keeps_nan=source == "f64")
    # On sm_90 .ftz leaves the arguments of conversions to f16 alone.
    flushes = ftz and source == "f32" and target != "f16"
    form = FORMATS.get(target)

    def run(values: Any) -> Lanes:
        numbers = opened(canonical_f32(flush_f32(values)) if flushes else values)
        if ftz and target == "f32":
            numbers = flush_wide(numbers, "f32", rounding)
        if negative_to_zero:
            numbers = relu(numbers)
        if finite and form is not None:
            numbers = np.clip(numbers, -form.largest, form.largest)
        found = closed(numbers)
        return clamp_unit(found) if sat else found

    return Lanewise((_NAME[source],), (_NAME[target],), run)


def _integral_float(op: Opcode, kind: str) -> Lanewise:
    """cvt.rni.f32.f32 and similar: conversion to an integral value of the same type."""
    integral = INTEGRAL[op.choice(_INTEGRAL)[:2]]
    ftz = kind == "f32" and op.flag("ftz")
    sat = kind != "bf16" and op.flag("sat")
    op.finish()
    if kind == "bf16":
        return Lanewise(("b16",), ("b16",), lambda p: to_bf16(integral(_opened("bf16")(p)), "rn"))
    by_kind: dict[str, Function] = {"f16": canonical_f16, "f32": canonical_f32, "f64": np.asarray}
    canonical = by_kind[kind]

    def run(values: Any) -> Lanes:
        found = integral(flush_f32(values) if ftz else values)
        return clamp_unit(found) if sat else canonical(found)

    return Lanewise((kind,), (kind,), run)


def _f32_to_f16(values: Any) -> Lanes:
    return canonical_f16(values.astype(np.float16))


_DIRECT = {
    ("f32", "f32"): Lanewise(("f32",), ("f32",), "{0}"),
    ("f64", "f64"): Lanewise(("f64",), ("f64",), "{0}"),
    ("f64", "f32"): Lanewise(("f32",), ("f64",), "{0}.astype(np.float64)"),
    ("f32", "f16"): Lanewise(("b16",), ("f32",), _F16_VALUES.take),
    ("f32", "bf16"): Lanewise(("b16",), ("f32",), from_bf16),
    ("f16", "f32"): Lanewise(("f32",), ("f16",), _f32_to_f16),
    ("bf16", "f32"): Lanewise(("f32",), ("b16",), narrow.f32_to_bf16),
}


def _pack(op: Opcode, count: int | None) -> Lanewise:
    """cvt.pack.sat: two saturated integers in the low bits, the low bits of c above."""
    third = bool(op.parts) and op.parts[-1] == "b32"
    if third:
        op.type(("b32",))
    op.type(("s32",))
    kinds = ("u2", "s2", "u4", "s4", "u8", "s8") if third else ("u16", "s16")
    kind = op.type(kinds)
    op.choice(("sat",))
    op.finish()
    check_count(op.text, count, (3,) if third else (2,), "source")
    low, high = _range(kind)
    bits = int(kind[1:])
    field = np.uint32((1 << bits) - 1)

    def run(a: Any, b: Any, c: Any = None) -> Lanes:
        upper = np.clip(a, low, high).astype(np.int32).view(np.uint32) & field
        lower = np.clip(b, low, high).astype(np.int32).view(np.uint32) & field
        pair = upper << bits | lower
        return pair if c is None else pair | c << 2 * bits

    sources = ("s32", "s32", "b32") if third else ("s32", "s32")
    return Lanewise(sources, ("b32",), coerced(run, sources))


FAMILIES = {"cvt": _convert}
