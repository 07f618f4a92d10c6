"""f32 and f64 arithmetic, against fractions rounded once; approximations against ``math``."""

import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.test_emulator.isa_oracle import (
    arithmetic,
    floats,
    is_nan,
    pattern_of,
    run,
    same,
    value_of,
)

_ROUNDINGS = ("rn", "rz", "rm", "rp")
_EXACT: dict[str, Callable[..., Fraction]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "fma": lambda a, b, c: a * b + c,
}


def _plain(name: str, rounding: str) -> Callable[..., Any]:
    """Function in float64 that is right for infinities, NaN and the sign of zero."""

    def total(a: Any, b: Any) -> Any:
        found = a + b
        if rounding == "rm" and found == 0 and math.copysign(1, a) != math.copysign(1, b):
            return -0.0
        return found

    def fused(a: Any, b: Any, c: Any) -> Any:
        product = a * b
        if np.isinf(product) and np.isfinite(a) and np.isfinite(b):
            product = np.copysign(1.0, product)
        return total(product, c)

    plain: dict[str, Callable[..., Any]] = {
        "add": total,
        "sub": lambda a, b: total(a, -b),
        "mul": operator.mul,
        "div": operator.truediv,
        "fma": fused,
    }
    return plain[name]


def _expected(name: str, rounding: str, kind: str, sources: list[np.ndarray]) -> list[int]:
    single = arithmetic(_EXACT[name], _plain(name, rounding), kind, rounding)
    return [single(*map(int, lane)) for lane in zip(*sources, strict=True)]


def _sources(name: str, kind: str) -> list[np.ndarray]:
    return [floats(kind, seed) for seed in range(3 if name == "fma" else 2)]


@pytest.mark.parametrize("rounding", _ROUNDINGS)
@pytest.mark.parametrize("name", _EXACT)
@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_arithmetic(name: str, kind: str, rounding: str) -> None:
    sources = _sources(name, kind)
    found = run(f"{name}.{rounding}.{kind}", *sources)
    assert same(found, _expected(name, rounding, kind, sources), kind) == []


@pytest.mark.parametrize("rounding", _ROUNDINGS)
@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma"])
@pytest.mark.parametrize("ftz", ["", ".ftz"])
def test_packed_is_twice_the_single(name: str, rounding: str, ftz: str) -> None:
    sources = _sources(name, "f32")
    single = run(f"{name}.{rounding}{ftz}.f32", *sources)
    pairs = run(f"{name}.{rounding}{ftz}.f32x2", *(s.view(np.uint64) for s in sources))
    nan = is_nan(single, "f32")
    assert np.array_equal(is_nan(pairs.view(np.uint32), "f32"), nan)
    assert np.array_equal(pairs.view(np.uint32)[~nan], single[~nan])
    # A uniform register is passed as a Python int.
    word = int(sources[0].view(np.uint64)[7])
    spread = [np.full(32, word, np.uint64), *(s.view(np.uint64)[:32] for s in sources[1:])]
    uniform = run(f"{name}.{rounding}{ftz}.f32x2", word, *spread[1:])
    assert np.array_equal(uniform, run(f"{name}.{rounding}{ftz}.f32x2", *spread))


_FLOAT32 = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.integers(-(1 << 24), 1 << 24).map(float),
    st.builds(math.ldexp, st.integers(-(1 << 24), 1 << 24), st.integers(-149, 100)),
)


@settings(max_examples=400, deadline=None)
@given(_FLOAT32, _FLOAT32, _FLOAT32)
# Midpoints of float32, decided by bits that float64 cannot hold: up, down, and among subnormals.
@example(1.0 + 2.0**-12, 1.0 + 2.0**-12, 2.0**-80)
@example(1.0 + 2.0**-12, 1.0 + 2.0**-12, -(2.0**-80))
@example((1 + 2.0**-23) * 2.0**-75, (1 + 2.0**-23) * 2.0**-75, 2.0**-126)
@example(2.0**23 - 2.0**12 + 1, 2.0**23 + 2.0**12 + 1, 2.0**70)  # the product is 2^46 + 1
@example(3.0, 2.0**23 + 0.5, 2.0**-149)
def test_fused_rounds_once(a: float, b: float, c: float) -> None:
    patterns = [pattern_of(v, "f32") for v in (a, b, c)]
    lanes = [np.array([p, 0x3F800000], np.uint32) for p in patterns]
    for rounding in _ROUNDINGS:
        single = arithmetic(_EXACT["fma"], _plain("fma", rounding), "f32", rounding)
        found = run(f"fma.{rounding}.f32", *lanes)
        assert same(found[:1], [single(*patterns)], "f32") == []


def test_fused_takes_constants() -> None:
    """Uniform operands are passed as numpy scalars."""
    a = floats("f32", 1)
    two, one = pattern_of(2.0, "f32"), pattern_of(1.0, "f32")
    expected = _expected("fma", "rn", "f32", [a, np.full_like(a, two), np.full_like(a, one)])
    assert same(run("fma.rn.f32", a, two, one), expected, "f32") == []
    assert same(run("fma.rn.f32", two, a, one), expected, "f32") == []
    ones = np.full_like(a, one)
    assert same(run("fma.rn.f32", two, one, a), _expected("add", "rn", "f32", [ones + 0x800000, a]),
                "f32") == []  # fmt: skip


def _flushed(patterns: np.ndarray, kind: str = "f32") -> np.ndarray:
    mantissa, sign = (0x7FFFFF, 0x80000000) if kind == "f32" else (0x3FF, 0x8000)
    small = (patterns & (sign - 1)) <= mantissa
    return np.where(small, patterns & sign, patterns).astype(patterns.dtype)


@pytest.mark.parametrize("name", _EXACT)
def test_ftz(name: str) -> None:
    sources = _sources(name, "f32")
    wide = [_flushed(s) for s in sources]
    expected = np.array([max(p, 0) for p in _expected(name, "rn", "f32", wide)], np.uint32)
    nan = [p < 0 for p in _expected(name, "rn", "f32", wide)]
    found = run(f"{name}.rn.ftz.f32", *sources)
    want = [-1 if n else int(p) for n, p in zip(nan, _flushed(expected), strict=True)]
    assert same(found, want, "f32") == []


@pytest.mark.parametrize(
    ("opcode", "sources", "expected"),
    [
        # 24 bits of ones, below the smallest normal number: flushed, not rounded up to it.
        ("mul.rn.ftz.f32", (0x00800000, 0x3F7FFFFF), 0),
        ("mul.rn.ftz.f32", (0x80800000, 0x3F7FFFFF), 0x80000000),
        ("fma.rn.ftz.f32", (0x3F7FFFFF, 0x00800000, 0), 0),
        # Rounded to the smallest normal number with all 24 bits: kept.
        ("fma.rn.ftz.f32", (0x85360C63, 0x81078CBF, 0x80800000), 0x80800000),
        ("mul.rn.ftz.f16", (0x0400, 0x3BFF), 0),
    ],
)
def test_flushing_looks_at_all_bits(opcode: str, sources: tuple[int, ...], expected: int) -> None:
    """Flushing depends on all bits of the exact result, as recorded on an H200."""
    dtype = np.uint16 if opcode.endswith("f16") else np.uint32
    assert run(opcode, *(np.array([s], dtype) for s in sources)).tolist() == [expected]


@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma"])
def test_sat(name: str) -> None:
    sources = _sources(name, "f32")
    clamped = [
        0 if p < 0 else pattern_of(min(max(value_of(p, "f32"), 0.0), 1.0) + 0.0, "f32")
        for p in _expected(name, "rn", "f32", sources)
    ]
    assert run(f"{name}.rn.sat.f32", *sources).tolist() == clamped


@pytest.mark.parametrize("narrow", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["add", "sub", "fma"])
@pytest.mark.parametrize("rounding", _ROUNDINGS)
def test_mixed_precision(name: str, narrow: str, rounding: str) -> None:
    factors = [floats(narrow, seed) for seed in range(2 if name == "fma" else 1)]
    addend = floats("f32", 9)
    wide = [
        np.array([pattern_of(value_of(int(p), narrow), "f32") for p in f], np.uint32)
        for f in factors
    ]
    found = run(f"{name}.{rounding}.f32.{narrow}", *factors, addend)
    expected = _expected(name, rounding, "f32", [*wide, addend])
    assert same(found, expected, "f32") == []


def _extreme(name: str, a: int, b: int, kind: str, nan: bool) -> int:
    """Pattern of the minimum or maximum; -1 for NaN."""
    x, y = value_of(a, kind), value_of(b, kind)
    if math.isnan(x) or math.isnan(y):
        if nan or (math.isnan(x) and math.isnan(y)):
            return -1
        return b if math.isnan(x) else a
    # Equal numbers differ only in the sign of zero.
    keys = [(v, -math.copysign(1, v) if name == "min" else math.copysign(1, v)) for v in (x, y)]
    if name == "min":
        return a if (x, math.copysign(1, x)) <= (y, math.copysign(1, y)) else b
    return a if keys[0] >= keys[1] else b


@pytest.mark.parametrize("kind", ["f32", "f64", "f16", "bf16"])
@pytest.mark.parametrize("name", ["min", "max"])
@pytest.mark.parametrize("nan", ["", ".NaN"])
def test_min_max(name: str, kind: str, nan: str) -> None:
    if kind == "f64":
        nan = ""
    a, b = floats(kind, 1), floats(kind, 2)
    b[::3] = a[::3] ^ (1 << (a.dtype.itemsize * 8 - 1))
    expected = [_extreme(name, int(x), int(y), kind, bool(nan)) for x, y in zip(a, b, strict=True)]
    assert same(run(f"{name}{nan}.{kind}", a, b), expected, kind) == []
    if kind in ("f16", "bf16"):
        pairs = run(f"{name}{nan}.{kind}x2", a.view(np.uint32), b.view(np.uint32))
        assert same(pairs.view(np.uint16), expected, kind) == []


@pytest.mark.parametrize("name", ["min", "max"])
def test_min_max_of_magnitudes(name: str) -> None:
    a, b, c = (floats("f32", seed) for seed in range(3))
    top = 0x80000000
    expected = []
    for x, y in zip(a.tolist(), b.tolist(), strict=True):
        found = _extreme(name, x & ~top, y & ~top, "f32", False)
        expected.append(found if found < 0 else found | ((x ^ y) & top))
    assert same(run(f"{name}.xorsign.abs.f32", a, b), expected, "f32") == []
    three = []
    for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True):
        first = _extreme(name, x & ~top, y & ~top, "f32", True)
        nan = value_of(z, "f32") != value_of(z, "f32")
        three.append(-1 if first < 0 or nan else _extreme(name, first, z & ~top, "f32", True))
    assert same(run(f"{name}.NaN.abs.f32", a, b, c, count=3), three, "f32") == []


@pytest.mark.parametrize("name", ["min", "max"])
def test_three_operands(name: str) -> None:
    a, b, c = (floats("f32", seed) for seed in range(3))
    expected = []
    for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True):
        first = _extreme(name, x, y, "f32", False)
        expected.append(_extreme(name, 0x7FC00000 if first < 0 else first, z, "f32", False))
    assert same(run(f"{name}.f32", a, b, c, count=3), expected, "f32") == []


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_signs(kind: str) -> None:
    a, b = floats(kind, 1), floats(kind, 2)
    top = a.dtype.type(1 << (a.dtype.itemsize * 8 - 1))
    nan = is_nan(a, kind)
    assert np.array_equal(run(f"abs.{kind}", a)[~nan], (a & ~top)[~nan])
    assert np.array_equal(run(f"neg.{kind}", a)[~nan], (a ^ top)[~nan])
    # copysign in PTX: the sign of a, the value of b.
    assert np.array_equal(run(f"copysign.{kind}", a, b), (a & top) | (b & ~top))


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_testp(kind: str) -> None:
    a = floats(kind, 1)
    smallest = 2.0**-126 if kind == "f32" else 2.0**-1022
    values = [value_of(int(p), kind) for p in a]
    properties: dict[str, Callable[[float], bool]] = {
        "finite": math.isfinite,
        "infinite": math.isinf,
        "number": lambda v: not math.isnan(v),
        "notanumber": math.isnan,
        "normal": lambda v: math.isfinite(v) and (v == 0 or abs(v) >= smallest),
        "subnormal": lambda v: 0 < abs(v) < smallest,
    }
    for name, holds in properties.items():
        assert run(f"testp.{name}.{kind}", a).tolist() == [holds(v) for v in values], name


@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.parametrize("rounding", _ROUNDINGS)
def test_rounded_reciprocal_and_root(kind: str, rounding: str) -> None:
    a = floats(kind, 3)
    if kind == "f64":  # its root is 2^-78 above 1 + (2^26 - 1) 2^-52
        a[0] = pattern_of(1 + (2.0**27 - 1) * 2.0**-52, "f64")
    one = np.full_like(a, pattern_of(1.0, kind))
    expected = _expected("div", rounding, kind, [one, a])
    assert same(run(f"rcp.{rounding}.{kind}", a), expected, kind) == []
    found = run(f"sqrt.{rounding}.{kind}", a)
    for pattern, root in zip(a.tolist(), found.tolist(), strict=True):
        _check_root(pattern, root, kind, rounding)


def _check_root(pattern: int, root: int, kind: str, rounding: str) -> None:
    """Check that the squares of the result and its neighbours enclose the argument properly."""
    value = value_of(pattern, kind)
    if not 0 < value < math.inf:
        if value == 0 or value == math.inf:
            assert root == pattern
        else:
            assert math.isnan(value_of(root, kind))
        return
    exact = Fraction(value)
    below, here, above = (Fraction(value_of(root + step, kind)) for step in (-1, 0, 1))
    if rounding in ("rz", "rm"):
        assert here**2 <= exact < above**2
    elif rounding == "rp":
        assert below**2 < exact <= here**2
    else:
        assert ((below + here) / 2) ** 2 <= exact <= ((here + above) / 2) ** 2


# Function of each approximation, with the error of float64 and one rounding in ulps.
_APPROXIMATE: dict[str, Callable[[float], float]] = {
    "rcp": lambda v: 1 / v,
    "sqrt": math.sqrt,
    "rsqrt": lambda v: 1 / math.sqrt(v),
    "sin": math.sin,
    "cos": math.cos,
    "lg2": math.log2,
    "ex2": lambda v: math.pow(2.0, v),
    "tanh": math.tanh,
}


@pytest.mark.parametrize("name", _APPROXIMATE)
@pytest.mark.parametrize("ftz", ["", ".ftz"])
def test_approximations(name: str, ftz: str) -> None:
    if name == "tanh":
        ftz = ""
    a = floats("f32", 4)
    found = run(f"{name}.approx{ftz}.f32", a)
    given_to = _flushed(a) if ftz else a
    for pattern, result in zip(given_to.tolist(), found.tolist(), strict=True):
        try:
            expected = _APPROXIMATE[name](value_of(pattern, "f32"))
        except ValueError:
            expected = math.nan
        except OverflowError:
            expected = math.inf
        except ZeroDivisionError:
            expected = math.copysign(math.inf, value_of(pattern, "f32"))
        if name == "lg2" and pattern & 0x7FFFFFFF == 0:
            expected = -math.inf
        if ftz and abs(expected) < 2.0**-126:
            expected = math.copysign(0.0, expected)
        if math.isnan(expected):
            assert result == 0x7FFFFFFF or name in ("rcp", "sqrt")
            assert math.isnan(value_of(result, "f32"))
        else:
            assert abs(result - pattern_of(expected, "f32")) <= 1, (name, hex(pattern))


def test_ex2_of_integers_is_exact() -> None:
    powers = np.arange(-150, 130, dtype=np.float32)
    exact = [pattern_of(2.0**p if p >= -149 else 0.0, "f32") for p in powers.tolist()]
    assert run("ex2.approx.f32", powers.view(np.uint32)).tolist() == exact
    flushed = [bits if p >= -126 else 0 for p, bits in zip(powers.tolist(), exact, strict=True)]
    assert run("ex2.approx.ftz.f32", powers.view(np.uint32)).tolist() == flushed


def test_approximate_division() -> None:
    """Divisors above 2^126 give zeros, NaN for infinite dividends (PTX ISA, div.approx)."""
    a = np.array([1.0, -1.0, math.inf, 3.0], np.float32).view(np.uint32)
    b = np.array([2.0**127, 1.5 * 2.0**126, 2.0**127, 2.0], np.float32).view(np.uint32)
    found = run("div.approx.f32", a, b)
    assert found.tolist() == [0, 0x80000000, 0x7FFFFFFF, pattern_of(1.5, "f32")]
    assert run("div.full.f32", a[:1], b[:1]).tolist() == [pattern_of(2.0**-127, "f32")]
    assert run("div.full.ftz.f32", a[:1], b[:1]).tolist() == [0]


def test_gross_approximations_of_f64() -> None:
    a = np.array([3.0, -0.0, -(2.0**-1040), math.inf, math.nan, 2.0**1023]).view(np.uint64)
    found = run("rcp.approx.ftz.f64", a)
    third = pattern_of(1 / 3, "f64") >> 32 << 32
    assert found.tolist() == [third, 0xFFF << 52, 0xFFF << 52, 0, 0x7FFFFFFF << 32, 0]
    root = run("rsqrt.approx.ftz.f64", a)
    expected = [pattern_of(3**-0.5, "f64") >> 32 << 32, 0xFFF << 52, 0xFFF << 52, 0]
    assert root[:4].tolist() == expected
    plain = run("rsqrt.approx.f64", a[:1])
    assert abs(int(plain[0]) - pattern_of(3**-0.5, "f64")) <= 1
