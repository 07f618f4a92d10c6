"""cvt to and from packed halves, FP8, FP6, FP4 and UE8M0, and to tf32 (PTX ISA, cvt).

Narrow results come from lookup tables with an entry for each bfloat16 pattern: a float32 value is
first cut to its upper half, whose last bit is set if a nonzero part was cut off, so that no
rounding to fewer than 7 mantissa bits can tell the difference.
"""

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from tests.emulator.isa.counting import count_nonzero
from tests.emulator.isa.flush import NAN_F16, canonical_f16, relu
from tests.emulator.isa.opcode import Opcode
from tests.emulator.isa.rounding import (
    FORMATS,
    Format,
    decoded,
    encode,
    from_bf16,
    quantum,
    rounded,
    to_bf16,
    to_f16,
)
from tests.emulator.isa.semantics import Lanes, Lanewise, check_count, coerced

_BYTES = ("e4m3x2", "e5m2x2", "e2m3x2", "e3m2x2")
_QUADRUPLES = ("e4m3x4", "e5m2x4", "e2m3x4", "e3m2x4", "e2m1x4")
_HALVES = ("f16x2", "bf16x2")
SOURCES = (*_BYTES, "e2m1x2", "ue8m0x2", *_HALVES)
TARGETS = (*SOURCES, *_QUADRUPLES, "tf32")


def convert(op: Opcode, target: str, source: str, count: int | None) -> Lanewise:
    """Conversion between already parsed types, at least one of them packed or tf32."""
    if target == "tf32" and source == "f32":
        return _to_tf32(op, count)
    if target in _HALVES and source == "f32":
        return _to_halves(op, target, count)
    if target in _QUADRUPLES and source == "f32":
        return _to_quadruple(op, target, count)
    if target == "ue8m0x2" and source in ("f32", "bf16x2"):
        return _to_ue8m0(op, source, count)
    if target in (*_BYTES, "e2m1x2") and source in ("f32", *_HALVES):
        op.choice(("rn",))
        op.choice(("satfinite",))
        clamps = op.flag("relu")
        op.finish()
        return _to_pair(op, target, source, count, encoded(target[:4], source, clamps))
    if source == "ue8m0x2" and target == "bf16x2":
        op.choice(("rn",))
        op.finish()
        return _from_pair(op, source, count, _ue8m0_values())
    if source in (*_BYTES, "e2m1x2") and target in _HALVES:
        op.choice(("rn",))
        clamps = op.flag("relu")
        op.finish()
        return _from_pair(op, source, count, _halves_of(source[:4], target, clamps))
    op.refuse(f"{target}.{source}")


# float32 to halves


def f32_to_bf16(values: Any) -> Lanes:
    """bfloat16 patterns of float32 values, to nearest, with canonical NaN."""
    patterns: Lanes = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    if count_nonzero(values != values):
        return np.where(np.isnan(values), np.uint16(0x7FFF), patterns)
    return patterns


def _pair_bf16(a: Any, b: Any) -> Lanes:
    """cvt.rn.bf16x2.f32: a in the upper half."""
    pairs = np.empty((max(a.size, b.size), 2), np.float32)
    pairs[:, 1] = a
    pairs[:, 0] = b
    result: Lanes = f32_to_bf16(pairs).view(np.uint32)[:, 0]
    return result


def _pair_f16(a: Any, b: Any) -> Lanes:
    """cvt.rn.f16x2.f32: a in the upper half."""
    pairs = np.empty((max(a.size, b.size), 2), np.float16)
    pairs[:, 1] = a
    pairs[:, 0] = b
    if count_nonzero(pairs != pairs):
        pairs[pairs != pairs] = NAN_F16
    result: Lanes = pairs.view(np.uint32)[:, 0]
    return result


def _to_halves(op: Opcode, target: str, count: int | None) -> Lanewise:
    rounding = op.choice(("rn", "rz", "rs"))
    negative_to_zero = op.flag("relu")
    finite = op.flag("satfinite")
    op.finish()
    stochastic = rounding == "rs"
    check_count(op.text, count, (3,) if stochastic else (2,), "source")
    form = FORMATS[target[:-2]]
    if rounding == "rn" and not negative_to_zero and not finite:
        pair = _pair_f16 if target == "f16x2" else _pair_bf16
        return Lanewise(("f32", "f32"), ("b32",), pair)

    def single(values: Any, random: Any = None) -> Lanes:
        numbers = np.asarray(values, np.float64)
        if negative_to_zero:
            numbers = relu(numbers)
        if finite:
            numbers = np.clip(numbers, -form.largest, form.largest)
        if random is not None:
            numbers = stochastically(numbers, form, random, 13 if target == "f16x2" else 16)
        if target == "bf16x2":
            return to_bf16(numbers, "rn" if stochastic else rounding)
        return canonical_f16(to_f16(numbers, "rn" if stochastic else rounding)).view(np.uint16)

    def run(a: Any, b: Any, random: Any = None) -> Lanes:
        upper = single(a, None if random is None else random >> 16 & form_mask)
        lower = single(b, None if random is None else random & form_mask)
        return upper.astype(np.uint32) << 16 | lower

    form_mask = np.uint32(0x1FFF if target == "f16x2" else 0xFFFF)
    if not stochastic:
        return Lanewise(("f32", "f32"), ("b32",), run)
    sources = ("f32", "f32", "b32")
    return Lanewise(sources, ("b32",), coerced(run, sources))


def _to_tf32(op: Opcode, count: int | None) -> Lanewise:
    check_count(op.text, count, (1,), "source")
    rounding = op.choice(("rna", "rn", "rz"))
    negative_to_zero = rounding != "rna" and op.flag("relu")
    finite = op.flag("satfinite")
    op.finish()
    form = FORMATS["tf32"]

    def away(values: Any) -> Lanes:
        # On sm_90 NaN loses its lower bits, possibly all set bits of its mantissa.
        words = values.view(np.uint32)
        result: Lanes = np.where(values != values, words, words + 0x1000) & 0xFFFFE000
        return result

    def run(values: Any) -> Lanes:
        numbers = values.astype(np.float64)
        if negative_to_zero:
            numbers = relu(numbers)
        if finite:
            numbers = np.clip(numbers, -form.largest, form.largest)
        found = rounded(numbers, form, rounding).astype(np.float32).view(np.uint32)
        return np.where(np.isnan(numbers), np.uint32(0x7FFFE000), found)

    plain = rounding == "rna" and not finite
    return Lanewise(("f32",), ("b32",), away if plain else run)


# Tables


def _keyed_values(source: str) -> Lanes:
    """float64 value of every 16-bit table index for this source."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(all="ignore"):
        if source == "f16x2":
            return patterns.view(np.float16).astype(np.float64)
        return from_bf16(patterns).astype(np.float64)


@cache
def encoded(name: str, source: str, clamps: bool) -> Lanes:
    """Table of ``.satfinite`` conversions to format ``name``: a bit pattern for each 16-bit index.

    ``source``: type whose values are indexed; ``clamps``: whether ReLU comes first.
    """
    form = FORMATS[name]
    with np.errstate(all="ignore"):
        values = _keyed_values(source)
        if clamps:
            values = relu(values)
        numbers = np.clip(rounded(values, form, "rn"), -form.largest, form.largest)
        return encode(numbers, form).astype(np.uint8)


@cache
def _ue8m0_codes(rounding: str, finite: bool) -> Lanes:
    """UE8M0 patterns of the bfloat16 keys: the exponent of the magnitude (PTX ISA, ue8m0)."""
    magnitude = np.arange(1 << 16) & 0x7FFF
    codes = magnitude >> 7
    if rounding == "rp":
        # 2^-127, a subnormal bfloat16, has code 0.
        codes += (magnitude & 0x7F != 0) & (magnitude > 0x40) & (magnitude < 0x7F80)
    if finite:
        codes = np.where((codes > 254) & (magnitude <= 0x7F80), 254, codes)
    return codes.astype(np.uint8)


@cache
def _ue8m0_values() -> Lanes:
    """bfloat16 pattern of every UE8M0 pattern."""
    values = np.arange(256, dtype=np.uint16) << 7
    values[0] = 0x0040
    values[255] = 0x7FFF
    return values


@cache
def _halves_of(name: str, target: str, clamps: bool) -> Lanes:
    """f16 or bf16 pattern of every byte in format ``name``; for 4-bit formats, pairs as 32 bits."""
    with np.errstate(all="ignore"):
        values = decoded(name)
        if clamps:
            values = relu(values)
        if target == "bf16x2":
            patterns = to_bf16(values, "rn")
        else:
            patterns = canonical_f16(values.astype(np.float16)).view(np.uint16)
    if name == "e2m1":
        high, low = np.divmod(np.arange(256), 16)
        return patterns[high].astype(np.uint32) << 16 | patterns[low]
    return np.resize(patterns, 256)


# Pairs


def _keys(pairs: Lanes) -> Lanes:
    """Table index of float32 pairs: the upper half, its last bit set if the rest is nonzero."""
    halves = pairs.view(np.uint16)
    result: Lanes = halves[:, 1::2] | halves[:, 0::2].astype(np.bool_)
    return result


def _to_pair(op: Opcode, target: str, source: str, count: int | None, table: Lanes) -> Lanewise:
    nibbles = target == "e2m1x2"

    def joined(codes: Lanes) -> Lanes:
        words: Lanes = codes.view(np.uint16)[:, 0]
        return (words | words >> 4).astype(np.uint8) if nibbles else words

    def from_f32(a: Any, b: Any) -> Lanes:
        pairs = np.empty((max(a.size, b.size), 2), np.float32)
        pairs[:, 1] = a
        pairs[:, 0] = b
        return joined(table.take(_keys(pairs)))

    def from_halves(a: Any) -> Lanes:
        return joined(table.take(a.view(np.uint16).reshape(-1, 2)))

    result = "b8" if nibbles else "b16"
    if source == "f32":
        check_count(op.text, count, (2,), "source")
        return Lanewise(("f32", "f32"), (result,), from_f32)
    check_count(op.text, count, (1,), "source")
    return Lanewise(("b32",), (result,), from_halves)


def _to_ue8m0(op: Opcode, source: str, count: int | None) -> Lanewise:
    rounding = op.choice(("rz", "rp"))
    finite = op.flag("satfinite")
    op.finish()
    return _to_pair(op, "ue8m0x2", source, count, _ue8m0_codes(rounding, finite))


def _from_pair(op: Opcode, source: str, count: int | None, table: Lanes) -> Lanewise:
    check_count(op.text, count, (1,), "source")
    if source == "e2m1x2":
        return Lanewise(("b8",), ("b32",), table.take)

    def run(a: Any) -> Lanes:
        result: Lanes = table.take(a.view(np.uint8)).view(np.uint32)
        return result

    return Lanewise(("b16",), ("b32",), run)


# Stochastic rounding


def stochastically(values: Lanes, form: Format, random: Any, bits: int) -> Lanes:
    """Each value rounded stochastically: up in magnitude if cut-off part plus random bits carry.

    Args:
        values: float64 holding float32 values.
        form: target format.
        random: ``bits`` random bits each, added to the top of the cut-off part (PTX ISA, .rs).
        bits: number of random bits.
    """
    step = quantum(values, form)
    scaled = np.ldexp(np.abs(values), -step)
    whole = np.floor(scaled)
    carry = scaled - whole + np.ldexp(np.asarray(random, np.float64), -bits) >= 1
    found = np.ldexp(whole + carry, step)
    limit = np.inf if form.infinite else form.largest
    found = np.where(found > form.largest, limit, found)
    return np.where(np.isfinite(values), np.copysign(found, values), values)


def _to_quadruple(op: Opcode, target: str, count: int | None) -> Lanewise:
    """cvt.rs of four values.

    The PTX ISA leaves open which of the random bytes each FP4 value uses: here a and e use the
    upper and the lower byte of the upper half of the random bits, b and f the bytes of the lower
    half.
    """
    op.choice(("rs",))
    op.choice(("satfinite",))
    clamps = op.flag("relu")
    op.finish()
    check_count(op.text, count, (5,), "source")
    form = FORMATS[target[:4]]
    nibbles = target == "e2m1x4"
    bits, width = (8, 4) if nibbles else (16, 8)
    shifts = (24, 8, 16, 0) if nibbles else (16, 16, 0, 0)

    def single(values: Any, random: Any) -> Lanes:
        numbers = np.atleast_1d(values).astype(np.float64)
        if clamps:
            numbers = relu(numbers)
        found = stochastically(numbers, form, random, bits)
        return encode(np.clip(found, -form.largest, form.largest), form)

    def run(a: Any, b: Any, e: Any, f: Any, random: Any) -> Lanes:
        result: Lanes = np.zeros(1, np.uint32)
        for values, shift in zip((a, b, e, f), shifts, strict=True):
            result = result << width | single(values, random >> shift & (1 << bits) - 1)
        return result.astype(np.uint16) if nibbles else result

    sources = ("f32", "f32", "f32", "f32", "b32")
    return Lanewise(sources, ("b16" if nibbles else "b32",), coerced(run, sources))
