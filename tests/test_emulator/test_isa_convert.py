"""cvt between scalar types, against Python's integers and fractions."""

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from tests.test_emulator.isa_oracle import (
    floats,
    integers,
    largest,
    pattern_of,
    round_exactly,
    run,
    run_scalar,
    same,
    value_of,
)

_INTEGERS = [f"{sign}{bits}" for sign in "us" for bits in (8, 16, 32, 64)]
_FLOATS = ["f16", "bf16", "f32", "f64"]
_ROUNDINGS = ("rn", "rz", "rm", "rp")
_TO_INTEGER: dict[str, Callable[[Fraction], int]] = {
    "rni": round,
    "rzi": math.trunc,
    "rmi": math.floor,
    "rpi": math.ceil,
}


def _bits(kind: str) -> int:
    return int(kind[1:])


def _number(value: int, kind: str) -> int:
    return value - (1 << _bits(kind)) if kind[0] == "s" and value >> (_bits(kind) - 1) else value


def _range(kind: str) -> tuple[int, int]:
    n = _bits(kind)
    return (-(1 << (n - 1)), (1 << (n - 1)) - 1) if kind[0] == "s" else (0, (1 << n) - 1)


def _patterns(kind: str) -> np.ndarray:
    return integers(_bits(kind), 1)


@pytest.mark.parametrize("target", _INTEGERS)
@pytest.mark.parametrize("source", _INTEGERS)
def test_between_integers(target: str, source: str) -> None:
    values = _patterns(source)
    low, high = _range(target)
    numbers = [_number(int(v), source) for v in values]
    limit = 1 << _bits(target)
    chopped = [n % limit for n in numbers]
    assert run(f"cvt.{target}.{source}", values).tolist() == chopped
    assert [run_scalar(f"cvt.{target}.{source}", int(v)) for v in values] == chopped
    own_low, own_high = _range(source)
    if own_low < low or own_high > high:
        clamped = [max(low, min(high, n)) % limit for n in numbers]
        assert run(f"cvt.sat.{target}.{source}", values).tolist() == clamped
        assert [run_scalar(f"cvt.sat.{target}.{source}", int(v)) for v in values] == clamped


@pytest.mark.parametrize("target", _FLOATS)
@pytest.mark.parametrize("source", _INTEGERS)
def test_from_integers(target: str, source: str) -> None:
    values = _patterns(source)
    numbers = [Fraction(_number(int(v), source)) for v in values]
    for rounding in _ROUNDINGS:
        expected = [round_exactly(n, target, rounding) if n else 0 for n in numbers]
        assert run(f"cvt.{rounding}.{target}.{source}", values).tolist() == expected


def test_from_integers_clamped() -> None:
    values = np.array([0, 1, 2, 0xFFFFFFFF], np.uint32)
    one = pattern_of(1.0, "f32")
    assert run("cvt.rn.sat.f32.u32", values).tolist() == [0, one, one, one]
    assert run("cvt.rn.sat.f32.s32", values).tolist() == [0, one, one, 0]


@pytest.mark.parametrize("target", _INTEGERS)
@pytest.mark.parametrize("source", _FLOATS)
def test_to_integers(target: str, source: str) -> None:
    values = floats(source, 1)
    edges = [
        2.0**31,
        2.0**32,
        2.0**63,
        2.0**64,
        -(2.0**63),
        0.5,
        1.5,
        2.5,
        -0.5,
        127.5,
        255.5,
        -1.0,
    ]
    edges += [np.nextafter(np.float32(e), np.float32(0)).item() for e in edges[:5]]
    values[: len(edges)] = [pattern_of(e, source) for e in edges]
    low, high = _range(target)
    wide = source == "f64" or _bits(target) == 64
    missing = (1 << (_bits(target) - 1)) if wide else 0
    for name, whole in _TO_INTEGER.items():
        expected = []
        for pattern in values.tolist():
            value = value_of(pattern, source)
            if math.isnan(value):
                expected.append(missing)
            elif math.isinf(value):
                expected.append((high if value > 0 else low) % (1 << _bits(target)))
            else:
                number = max(low, min(high, whole(Fraction(value))))
                expected.append(number % (1 << _bits(target)))
        assert run(f"cvt.{name}.{target}.{source}", values).tolist() == expected, name
        assert run(f"cvt.{name}.sat.{target}.{source}", values).tolist() == expected, name


def test_to_integers_with_ftz() -> None:
    values = np.array([1, 0x80000001, 0x00800000], np.uint32)
    assert run("cvt.rpi.s32.f32", values).tolist() == [1, 0, 1]
    assert run("cvt.rpi.ftz.s32.f32", values).tolist() == [0, 0, 1]


def _rounded(pattern: int, source: str, target: str, rounding: str) -> int:
    value = value_of(pattern, source)
    if math.isnan(value):
        return -1
    if math.isinf(value) or value == 0:
        return pattern_of(value, target)
    return round_exactly(Fraction(value), target, rounding)


@pytest.mark.parametrize("target", _FLOATS)
@pytest.mark.parametrize("source", _FLOATS)
def test_between_floats(target: str, source: str) -> None:
    values = floats(source, 2, 1024)
    exactly = (source, target) in {("f16", "f32"), ("bf16", "f32")} or target == "f64"
    roundings = ("",) if exactly or source == target else _ROUNDINGS
    if source == target == "bf16":
        return  # only the conversion to integral values exists
    for rounding in roundings:
        expected = [_rounded(p, source, target, rounding or "rn") for p in values.tolist()]
        opcode = f"cvt{'.' if rounding else ''}{rounding}.{target}.{source}"
        found = run(opcode, values)
        assert same(found, expected, target) == [], opcode
        if target in ("f16", "bf16") and source != "f64":
            nan = [p < 0 for p in expected]
            assert set(found[nan].tolist()) <= {0x7FFF}


@pytest.mark.parametrize("target", ["f16", "bf16"])
@pytest.mark.parametrize("rounding", ["rn", "rz"])
def test_relu_and_satfinite(target: str, rounding: str) -> None:
    values = floats("f32", 2, 1024)
    bound = pattern_of(float(largest(target)), target)
    for modifiers in (".relu", ".satfinite", ".relu.satfinite"):
        expected = []
        for pattern in values.tolist():
            found = _rounded(pattern, "f32", target, rounding)
            if found < 0:
                expected.append(0x7FFF)
                continue
            if "satfinite" in modifiers and found & 0x7FFF > bound:
                found = found & 0x8000 | bound
            expected.append(0 if "relu" in modifiers and found & 0x8000 else found)
        assert run(f"cvt.{rounding}{modifiers}.{target}.f32", values).tolist() == expected
        pairs = run(f"cvt.{rounding}{modifiers}.{target}x2.f32", values, values[::-1].copy())
        assert (pairs >> 16).tolist() == expected
        assert (pairs & 0xFFFF).tolist() == expected[::-1]


@pytest.mark.parametrize("target", ["f16", "bf16"])
@pytest.mark.parametrize("rounding", ["rn", "rz"])
def test_packed_halves(target: str, rounding: str) -> None:
    a, b = floats("f32", 2), floats("f32", 3)
    found = run(f"cvt.{rounding}.{target}x2.f32", a, b)

    def single(patterns: np.ndarray) -> list[int]:
        rounded = [_rounded(p, "f32", target, rounding) for p in patterns.tolist()]
        return [0x7FFF if p < 0 else p for p in rounded]

    assert (found >> 16).tolist() == single(a)
    assert (found & 0xFFFF).tolist() == single(b)
    # A constant is passed as a numpy scalar.
    mixed = run(f"cvt.{rounding}.{target}x2.f32", int(a[0]), b)
    assert (mixed >> 16).tolist() == single(a[:1]) * len(b)
    assert (mixed & 0xFFFF).tolist() == single(b)


@pytest.mark.parametrize("kind", _FLOATS)
@pytest.mark.parametrize("rounding", _TO_INTEGER)
def test_to_integral_values(kind: str, rounding: str) -> None:
    values = floats(kind, 5)
    expected = []
    for pattern in values.tolist():
        value = value_of(pattern, kind)
        if math.isfinite(value):
            whole = _TO_INTEGER[rounding](Fraction(value))
            expected.append(pattern_of(math.copysign(float(whole), value), kind))
        else:
            expected.append(-1 if math.isnan(value) else pattern)
    assert same(run(f"cvt.{rounding}.{kind}.{kind}", values), expected, kind) == []


def test_clamping_to_the_unit_interval() -> None:
    values = np.array([-1.0, -0.0, 0.25, 7.0, math.nan, math.inf], np.float32).view(np.uint32)
    expected = [0, 0, pattern_of(0.25, "f32"), *[pattern_of(1.0, "f32")] * 2]
    found = run("cvt.sat.f32.f32", values)
    assert found.tolist() == [*expected[:4], 0, expected[4]]
    halves = run("cvt.rn.sat.f16.f32", values)
    assert halves.tolist() == [0, 0, 0x3400, 0x3C00, 0, 0x3C00]


def test_ftz_between_floats() -> None:
    small = np.array([1, 0x80000001, 0x007FFFFF], np.uint32)
    assert run("cvt.ftz.f32.f32", small).tolist() == [0, 0x80000000, 0]
    assert run("cvt.ftz.f64.f32", small).tolist() == [0, 1 << 63, 0]
    # An H200 keeps subnormal arguments of conversions to f16.
    assert run("cvt.rp.ftz.f16.f32", small).tolist() == [1, 0x8000, 1]
    doubles = np.array([2.0**-127, -(2.0**-127), 2.0**-126]).view(np.uint64)
    assert run("cvt.rn.ftz.f32.f64", doubles).tolist() == [0, 0x80000000, 0x00800000]


@pytest.mark.parametrize(("rounding", "up", "tie"), [("rna", 1, 1), ("rn", 1, 0), ("rz", 0, 0)])
def test_tf32(rounding: str, up: int, tie: int) -> None:
    """tf32 keeps ten bits of mantissa and drops 13."""
    base = 0x3F800000
    values = np.array([base, base + 0x0FFF, base + 0x1000, base + 0x1001, base + 0x3000], np.uint32)
    odd_tie = 0x2000 * (1 if rounding == "rz" else 2)
    expected = [base, base, base + 0x2000 * tie, base + 0x2000 * up, base + odd_tie]
    assert run(f"cvt.{rounding}.tf32.f32", values).tolist() == expected
    top = np.array([0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000], np.uint32)
    beyond = 0x7F7FE000 if rounding == "rz" else 0x7F800000
    plain = run(f"cvt.{rounding}.tf32.f32", top).tolist()
    assert plain == [beyond, beyond | 1 << 31, 0x7F800000]
    finite = run(f"cvt.{rounding}.satfinite.tf32.f32", top).tolist()
    assert finite == [0x7F7FE000, 0xFF7FE000, 0x7F7FE000]
    if rounding != "rna":
        assert run(f"cvt.{rounding}.relu.tf32.f32", top).tolist()[1] == 0
        nan = np.array([0x7FC00000, 0xFF800001], np.uint32)
        assert run(f"cvt.{rounding}.tf32.f32", nan).tolist() == [0x7FFFE000] * 2


@pytest.mark.parametrize("kind", ["u16", "s16", "u8", "s8", "u4", "s4", "u2", "s2"])
def test_pack(kind: str) -> None:
    a, b, c = (integers(32, seed) for seed in range(3))
    low, high = _range(kind)
    n = _bits(kind)
    expected = []
    for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True):
        upper, lower = (max(low, min(high, _number(v, "s32"))) % (1 << n) for v in (x, y))
        above = 0 if n == 16 else z << 2 * n
        expected.append((lower | upper << n | above) & 0xFFFFFFFF)
    if n == 16:
        assert run(f"cvt.pack.sat.{kind}.s32", a, b).tolist() == expected
    else:
        assert run(f"cvt.pack.sat.{kind}.s32.b32", a, b, c).tolist() == expected
