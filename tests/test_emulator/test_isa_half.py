"""f16 and bf16 arithmetic against fractions, rounded once."""

import math
import operator
from collections.abc import Callable
from fractions import Fraction

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

_EXACT: dict[str, tuple[int, Callable[..., Fraction]]] = {
    "add": (2, operator.add),
    "sub": (2, operator.sub),
    "mul": (2, operator.mul),
    "fma": (3, lambda a, b, c: a * b + c),
}
_KINDS = ("f16", "bf16")


def _expected(name: str, kind: str, sources: list[np.ndarray]) -> list[int]:
    single = arithmetic(_EXACT[name][1], _EXACT[name][1], kind, "rn")
    return [single(*map(int, lane)) for lane in zip(*sources, strict=True)]


@pytest.mark.parametrize("name", _EXACT)
@pytest.mark.parametrize("kind", _KINDS)
def test_arithmetic(name: str, kind: str) -> None:
    sources = [floats(kind, seed) for seed in range(_EXACT[name][0])]
    expected = _expected(name, kind, sources)
    found = run(f"{name}.rn.{kind}", *sources)
    assert same(found, expected, kind) == []
    assert set(found[is_nan(found, kind)].tolist()) == {0x7FFF}
    pairs = run(f"{name}.rn.{kind}x2", *(s.view(np.uint32) for s in sources))
    assert pairs.view(np.uint16).tolist() == found.tolist()


@settings(max_examples=300, deadline=None)
@given(*[st.integers(0, 0xFFFF)] * 3)
# The product is a bf16 midpoint; the addend decides, though float64 cannot add so small a number.
@example(0x3F81, 0x3FC0, 0x1000)
@example(0x3F81, 0x3FC0, 0x9000)
@example(0x3C01, 0x3E00, 0x0001)
def test_fused_rounds_once(a: int, b: int, c: int) -> None:
    for kind in _KINDS:
        sources = [np.array([v], np.uint16) for v in (a, b, c)]
        assert same(run(f"fma.rn.{kind}", *sources), _expected("fma", kind, sources), kind) == []


@pytest.mark.parametrize("name", _EXACT)
def test_ftz_and_sat_of_f16(name: str) -> None:
    sources = [floats("f16", seed) for seed in range(_EXACT[name][0])]

    def flush(pattern: int) -> int:
        return pattern & 0x8000 if 0 < pattern & 0x7FFF < 0x400 else pattern

    flat = [np.array([flush(int(p)) for p in s], np.uint16) for s in sources]
    expected = [p if p < 0 else flush(p) for p in _expected(name, "f16", flat)]
    assert same(run(f"{name}.rn.ftz.f16", *sources), expected, "f16") == []
    clamped = [
        0 if p < 0 else pattern_of(min(max(value_of(p, "f16"), 0.0), 1.0) + 0.0, "f16")
        for p in _expected(name, "f16", sources)
    ]
    assert run(f"{name}.rn.sat.f16", *sources).tolist() == clamped


@pytest.mark.parametrize("kind", _KINDS)
def test_relu_and_out_of_bounds(kind: str) -> None:
    a, b, c = (floats(kind, seed) for seed in range(3))
    a[:40:5] = 0x7FF7
    b[1:40:5] = 0x7FF7
    c[2:40:5] = 0x7FF7
    plain = _expected("fma", kind, [a, b, c])
    clamped = [0x7FFF if p < 0 else p if value_of(p, kind) > 0 else 0 for p in plain]
    assert run(f"fma.rn.relu.{kind}", a, b, c).tolist() == clamped
    outside = (a == 0x7FF7) | (b == 0x7FF7)
    filled = np.where(outside, 0, clamped).tolist()
    assert run(f"fma.rn.oob.relu.{kind}", a, b, c).tolist() == filled
    kept = [0 if out else 0x7FFF if p < 0 else p for out, p in zip(outside, plain, strict=True)]
    assert run(f"fma.rn.oob.{kind}", a, b, c).tolist() == kept


@pytest.mark.parametrize("kind", _KINDS)
def test_signs(kind: str) -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    nan = is_nan(every, kind)
    assert run(f"abs.{kind}", every).tolist() == np.where(nan, 0x7FFF, every & 0x7FFF).tolist()
    negated = np.where(nan, 0x7FFF, every ^ 0x8000).tolist()
    assert run(f"neg.{kind}", every).tolist() == negated
    assert run(f"neg.{kind}x2", every.view(np.uint32)).view(np.uint16).tolist() == negated


def test_signs_with_ftz() -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    small = (every & 0x7FFF) < 0x400
    nan = is_nan(every, "f16")
    expected = np.where(nan, 0x7FFF, np.where(small, 0, every & 0x7FFF))
    assert run("abs.ftz.f16", every).tolist() == expected.tolist()


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["ex2", "tanh"])
def test_approximations(name: str, kind: str) -> None:
    """Results for all 65536 arguments are correctly rounded."""
    every = np.arange(1 << 16, dtype=np.uint16)
    opcode = f"{name}.approx{'.ftz' if (name, kind) == ('ex2', 'bf16') else ''}.{kind}"
    found = run(opcode, every)
    plain = math.tanh if name == "tanh" else lambda v: math.pow(2.0, v)
    for pattern, result in zip(every.tolist(), found.tolist(), strict=True):
        value = value_of(pattern, kind)
        try:
            expected = plain(value)
        except OverflowError:
            expected = math.inf
        if "ftz" in opcode and expected < 2.0**-126:
            expected = 0.0
        if math.isnan(expected):
            assert result == 0x7FFF
        else:
            assert result == pattern_of(expected, kind), hex(pattern)
    assert run(f"{opcode}x2", every.view(np.uint32)).view(np.uint16).tolist() == found.tolist()
