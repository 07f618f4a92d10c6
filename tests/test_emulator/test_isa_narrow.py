"""FP8, FP6, FP4 and UE8M0: every pattern and every rounding edge, against tables of values."""

import math
from fractions import Fraction
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.test_emulator.isa_oracle import pattern_of, quiet, run, value_of

_TYPES: dict[str, Any] = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
}
_BITS = {"e4m3": 8, "e5m2": 8, "e2m1": 4, "e2m3": 6, "e3m2": 6}
_NAN = {"e4m3": 0x7F, "e5m2": 0x7F, "e2m1": 0x7, "e2m3": 0x1F, "e3m2": 0x1F}


def _values(name: str) -> list[float]:
    """Value of each pattern, by ml_dtypes."""
    patterns = np.arange(1 << _BITS[name], dtype=np.uint8)
    return patterns.view(_TYPES[name]).astype(np.float64).tolist()


def _magnitudes(name: str) -> list[Fraction]:
    """The finite nonnegative numbers, by pattern."""
    half = _values(name)[: 1 << (_BITS[name] - 1)]
    return [Fraction(value) for value in half if math.isfinite(value)]


def _nearest(value: float, name: str) -> int:
    """Pattern of the nearest number, ties to even; saturates at the largest number."""
    if math.isnan(value):
        return _NAN[name]
    numbers = _magnitudes(name)
    sign = (1 << (_BITS[name] - 1)) if math.copysign(1, value) < 0 else 0
    if math.isinf(value):
        return sign | (len(numbers) - 1)
    exact = abs(Fraction(value))
    return sign | min(range(len(numbers)), key=lambda p: (abs(numbers[p] - exact), p % 2))


def _edges(name: str) -> list[float]:
    """Every number, every midpoint, and their float32 neighbours; specials; both signs."""
    numbers = [float(n) for n in _magnitudes(name)]
    points = numbers + [(a + b) / 2 for a, b in pairwise(numbers)]
    points += [numbers[-1] * 1.0625, numbers[-1] * 2, 2.0**-149, 2.0**-140, 3e38]
    with quiet():
        single = np.array(points, np.float32)
        around = [np.nextafter(single, np.float32(to)) for to in (np.inf, -np.inf)]
    values = np.concatenate([single, *around]).tolist()
    return [*values, *(-v for v in values), math.inf, -math.inf, math.nan]


def _patterns(values: list[float]) -> np.ndarray:
    return np.array(values, np.float32).view(np.uint32)


def _packed(upper: list[int], lower: list[int], name: str) -> list[int]:
    shift = 4 if name == "e2m1" else 8
    return [a << shift | b for a, b in zip(upper, lower, strict=True)]


@pytest.mark.parametrize("name", _TYPES)
def test_from_f32(name: str) -> None:
    values = _edges(name)
    expected = [_nearest(v, name) for v in values]
    a = _patterns(values)
    found = run(f"cvt.rn.satfinite.{name}x2.f32", a, a[::-1].copy())
    assert found.tolist() == _packed(expected, expected[::-1], name)
    clamped = [
        p if math.isnan(v) else 0 if math.copysign(1, v) < 0 else p
        for p, v in zip(expected, values, strict=True)
    ]
    relu = run(f"cvt.rn.satfinite.relu.{name}x2.f32", a, a[::-1].copy())
    assert relu.tolist() == _packed(clamped, clamped[::-1], name)
    # A constant is passed as a numpy scalar.
    mixed = run(f"cvt.rn.satfinite.{name}x2.f32", int(a[3]), a)
    assert mixed.tolist() == _packed([expected[3]] * len(a), expected, name)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 0xFFFFFFFF), min_size=32, max_size=32))
def test_from_any_f32(patterns: list[int]) -> None:
    a = np.array(patterns, np.uint32)
    for name in _TYPES:
        expected = [_nearest(value_of(p, "f32"), name) for p in patterns]
        found = run(f"cvt.rn.satfinite.{name}x2.f32", a, a)
        assert found.tolist() == _packed(expected, expected, name)


@pytest.mark.parametrize("source", ["f16", "bf16"])
@pytest.mark.parametrize("name", _TYPES)
def test_from_every_half(name: str, source: str) -> None:
    """Conversions agree with ml_dtypes except in overflow and NaN."""
    every = np.arange(1 << 16, dtype=np.uint16)
    limit = float(_magnitudes(name)[-1])
    dtype = np.float16 if source == "f16" else ml_dtypes.bfloat16
    with quiet():
        values = every.view(dtype).astype(np.float32)
        clipped = np.clip(values, -limit, limit).astype(_TYPES[name]).view(np.uint8)
    expected = np.where(np.isnan(values), _NAN[name], clipped)
    found = run(f"cvt.rn.satfinite.{name}x2.{source}x2", every.view(np.uint32))
    upper, lower = expected[1::2].tolist(), expected[0::2].tolist()
    assert found.tolist() == _packed(upper, lower, name)


@pytest.mark.parametrize("target", ["f16", "bf16"])
@pytest.mark.parametrize("name", _TYPES)
def test_to_halves(name: str, target: str) -> None:
    values = _values(name)
    single = [0x7FFF if math.isnan(v) else pattern_of(v, target) for v in values]
    clamped = [
        p if math.isnan(v) else 0 if p & 0x8000 else p for p, v in zip(single, values, strict=True)
    ]
    if name == "e2m1":
        pairs = np.arange(256, dtype=np.uint8)
        split = [(int(p) >> 4, int(p) & 15) for p in pairs]
    else:
        patterns = np.arange(1 << _BITS[name])
        pairs = (patterns << 8 | patterns[::-1]).astype(np.uint16)
        split = list(zip(patterns.tolist(), patterns[::-1].tolist(), strict=True))
    for relu, table in (("", single), (".relu", clamped)):
        found = run(f"cvt.rn{relu}.{target}x2.{name}x2", pairs)
        assert found.tolist() == [table[a] << 16 | table[b] for a, b in split]


def _ue8m0(value: float, rounding: str, finite: bool) -> int:
    """Exponent code of a magnitude, from the format: code c is 2^(c - 127), 255 is NaN."""
    if math.isnan(value):
        return 255
    if math.isinf(value):
        return 254 if finite else 255
    exact = abs(Fraction(value))
    code = 0
    while Fraction(2) ** (code - 127) < exact:
        code += 1
    if rounding == "rz" and code and Fraction(2) ** (code - 127) > exact:
        code -= 1
    return min(code, 254) if finite else code


@pytest.mark.parametrize("rounding", ["rz", "rp"])
@pytest.mark.parametrize("finite", ["", ".satfinite"])
def test_to_ue8m0(rounding: str, finite: str) -> None:
    powers = [2.0**e for e in (-149, -140, -128, -127, -126, -1, 0, 1, 126, 127)]
    single = np.array([0.0, *powers, 448.0 / 6, 1.5 * 2.0**127], np.float32)
    with quiet():
        around = [np.nextafter(single, np.float32(to)) for to in (np.inf, -np.inf)]
    near = np.concatenate([single, *around, -single]).tolist()
    values = [*near, math.inf, -math.inf, math.nan]
    a = _patterns(values)
    expected = [_ue8m0(v, rounding, bool(finite)) for v in values]
    found = run(f"cvt.{rounding}{finite}.ue8m0x2.f32", a, a[::-1].copy())
    assert found.tolist() == [x << 8 | y for x, y in zip(expected, expected[::-1], strict=True)]


@pytest.mark.parametrize("rounding", ["rz", "rp"])
@pytest.mark.parametrize("finite", ["", ".satfinite"])
def test_every_bf16_to_ue8m0(rounding: str, finite: str) -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    found = run(f"cvt.{rounding}{finite}.ue8m0x2.bf16x2", every.view(np.uint32))
    codes = np.stack([found & 255, found >> 8], axis=1).reshape(-1).tolist()
    picks = [*range(0, 1 << 16, 61), *range(0x7F00, 0x8100), *range(0x100)]
    assert [codes[p] for p in picks] == [
        _ue8m0(value_of(p, "bf16"), rounding, bool(finite)) for p in picks
    ]


def test_from_ue8m0() -> None:
    codes = np.arange(256)
    found = run("cvt.rn.bf16x2.ue8m0x2", (codes << 8 | codes[::-1]).astype(np.uint16))
    values = [2.0 ** (c - 127) if c < 255 else math.nan for c in codes.tolist()]
    single = [0x7FFF if math.isnan(v) else pattern_of(v, "bf16") for v in values]
    assert (found >> 16).tolist() == single
    assert (found & 0xFFFF).tolist() == single[::-1]


# Stochastic rounding


def _stochastic(value: float, numbers: list[Fraction], random: Fraction) -> Fraction:
    """Round up in magnitude where the dropped fraction plus the random fraction carries."""
    magnitude = abs(Fraction(value))
    if magnitude >= numbers[-1]:
        return numbers[-1]
    above = next(i for i, n in enumerate(numbers) if n > magnitude)
    low, high = numbers[above - 1], numbers[above]
    return high if (magnitude - low) / (high - low) + random >= 1 else low


_FLOAT32 = st.floats(-500, 500, width=32, allow_nan=False)


@settings(max_examples=100, deadline=None)
@given(*[_FLOAT32] * 4, st.integers(0, 0xFFFFFFFF))
def test_four_at_random(a: float, b: float, e: float, f: float, random: int) -> None:
    inputs = [a, b, e, f]
    lanes = [np.array([pattern_of(v, "f32")], np.uint32) for v in inputs]
    for name in _TYPES:
        if name == "e2m1":
            fields = [Fraction(random >> shift & 255, 256) for shift in (24, 8, 16, 0)]
        else:
            fields = [Fraction(random >> shift & 65535, 65536) for shift in (16, 16, 0, 0)]
        numbers = _magnitudes(name)
        sign = 1 << (_BITS[name] - 1)
        expected = 0
        for value, field in zip(inputs, fields, strict=True):
            pattern = numbers.index(_stochastic(value, numbers, field))
            pattern |= sign if math.copysign(1, value) < 0 else 0
            expected = expected << (4 if name == "e2m1" else 8) | pattern
        found = run(f"cvt.rs.satfinite.{name}x4.f32", *lanes, random)
        assert found.tolist() == [expected], name


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 0x7F7FFFFF), st.integers(0, 0xFFFFFFFF))
def test_two_at_random(pattern: int, random: int) -> None:
    """bf16 drops 16 bits and adds 16 random bits; normal f16 values drop and add 13."""
    a = np.array([pattern, 0x3F800000 | pattern & 0x7FFFFF], np.uint32)
    found = run("cvt.rs.bf16x2.f32", a, a, random)
    for lane, bits in enumerate(a.tolist()):
        upper = bits + (random >> 16) >> 16
        lower = bits + (random & 0xFFFF) >> 16
        assert int(found[lane]) == upper << 16 | lower
    halves = run("cvt.rs.f16x2.f32", a, a, random)
    bits = int(a[1])
    for shift in (16, 0):
        carried = (bits & 0x7FFFFF) + (random >> shift & 0x1FFF) >> 13
        assert int(halves[1]) >> shift & 0xFFFF == 0x3C00 + carried


def test_special_values_at_random() -> None:
    specials = _patterns([math.nan, math.inf, -math.inf])
    found = run("cvt.rs.satfinite.e4m3x4.f32", specials, specials, specials, specials, 0xFFFFFFFF)
    assert found.tolist() == [0x7F7F7F7F, 0x7E7E7E7E, 0xFEFEFEFE]
    relu = run("cvt.rs.relu.satfinite.e2m1x4.f32", *[specials] * 4, 0)
    assert relu.tolist() == [0x7777, 0x7777, 0]
    halves = run("cvt.rs.satfinite.f16x2.f32", specials, specials, 0)
    assert halves.tolist() == [0x7FFF7FFF, 0x7BFF7BFF, 0xFBFFFBFF]
