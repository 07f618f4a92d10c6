"""Comparisons and selections, against Python's operators."""

import math
import operator
from collections.abc import Callable

import numpy as np
import pytest

from tests.test_emulator.isa_oracle import floats, integers, run, run_scalar, value_of

_ORDER = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
_UNSIGNED_NAMES = {"lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge}
_COMBINE = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}
_SMALLEST = {"f32": 2.0**-126, "f16": 2.0**-14}


def _number(value: int, kind: str) -> int:
    bits = int(kind[1:])
    return value - (1 << bits) if kind[0] == "s" and value >> (bits - 1) else value


def _integer_comparisons() -> list[tuple[str, str]]:
    cases = []
    for bits in (16, 32, 64):
        cases += [(name, f"{sign}{bits}") for sign in "us" for name in _ORDER]
        cases += [(name, f"u{bits}") for name in _UNSIGNED_NAMES]
        cases += [("eq", f"b{bits}"), ("ne", f"b{bits}")]
    return cases


@pytest.mark.parametrize(("name", "kind"), _integer_comparisons())
def test_integers(name: str, kind: str) -> None:
    bits = int(kind[1:])
    a, b = integers(bits, 1), integers(bits, 2)
    b[::4] = a[::4]
    compare = (_ORDER | _UNSIGNED_NAMES)[name]
    expected = [
        compare(_number(int(x), kind), _number(int(y), kind)) for x, y in zip(a, b, strict=True)
    ]
    assert run(f"setp.{name}.{kind}", a, b).tolist() == expected
    found = [run_scalar(f"setp.{name}.{kind}", int(x), int(y)) for x, y in zip(a, b, strict=True)]
    assert found == expected


def _float_compare(name: str) -> Callable[[float, float], bool]:
    if name in ("num", "nan"):
        return lambda a, b: (math.isnan(a) or math.isnan(b)) == (name == "nan")
    unordered = name.endswith("u")
    compare = _ORDER[name.removesuffix("u")]
    return lambda a, b: unordered if math.isnan(a) or math.isnan(b) else compare(a, b)


_FLOATING = [*_ORDER, *(f"{name}u" for name in _ORDER), "num", "nan"]


def _value(pattern: int, kind: str, ftz: bool) -> float:
    value = value_of(pattern, kind)
    return math.copysign(0.0, value) if ftz and abs(value) < _SMALLEST[kind] else value


@pytest.mark.parametrize("name", _FLOATING)
@pytest.mark.parametrize("kind", ["f32", "f64", "f16", "bf16", "ftz.f32", "ftz.f16"])
def test_floats(name: str, kind: str) -> None:
    ftz, base = kind.startswith("ftz"), kind.removeprefix("ftz.")
    a, b = floats(base, 1), floats(base, 2)
    b[::4] = a[::4]
    compare = _float_compare(name)
    expected = [
        compare(_value(int(x), base, ftz), _value(int(y), base, ftz))
        for x, y in zip(a, b, strict=True)
    ]
    assert run(f"setp.{name}.{kind}", a, b).tolist() == expected
    if base in ("f16", "bf16"):
        pair = f"setp.{name}.{kind}x2"
        low, high = run(pair, a.view(np.uint32), b.view(np.uint32), results=2)
        assert [low.tolist(), high.tolist()] == [expected[0::2], expected[1::2]]


@pytest.mark.parametrize("combine", _COMBINE)
@pytest.mark.parametrize("kind", ["s32", "f32"])
def test_combined_with_a_predicate(combine: str, kind: str) -> None:
    a, b = integers(32, 1), integers(32, 2)
    c = integers(16, 3) & 1
    if kind == "s32":
        less = [_number(int(x), kind) < _number(int(y), kind) for x, y in zip(a, b, strict=True)]
    else:
        less = [value_of(int(x), kind) < value_of(int(y), kind) for x, y in zip(a, b, strict=True)]
    join = _COMBINE[combine]
    opcode = f"setp.lt.{combine}.{kind}"
    first = [join(t, bool(z)) for t, z in zip(less, c, strict=True)]
    second = [join(not t, bool(z)) for t, z in zip(less, c, strict=True)]
    assert run(opcode, a, b, c).tolist() == first
    p, q = run(opcode, a, b, c, results=2)
    assert [p.tolist(), q.tolist()] == [first, second]
    if kind == "s32":
        lanes = list(zip(a.tolist(), b.tolist(), c.astype(bool).tolist(), strict=True))
        assert [run_scalar(opcode, *lane) for lane in lanes] == first
        both = list(zip(first, second, strict=True))
        assert [run_scalar(opcode, *lane, results=2) for lane in lanes] == both


def test_second_destination_without_a_predicate() -> None:
    a, b = np.array([1, 2, 3], np.uint32), np.array([3, 2, 1], np.uint32)
    p, q = run("setp.lt.s32", a, b, results=2)
    assert [p.tolist(), q.tolist()] == [[True, False, False], [False, True, True]]
    assert run_scalar("setp.lt.s32", 1, 2, results=2) == (True, False)


_TRUE = {"u32": 0xFFFFFFFF, "s32": 0xFFFFFFFF, "u16": 0xFFFF, "s16": 0xFFFF, "f32": 0x3F800000,
         "f16": 0x3C00, "bf16": 0x3F80}  # fmt: skip


@pytest.mark.parametrize(
    ("target", "kind"),
    [("u32", "s32"), ("s32", "u64"), ("f32", "u16"), ("f32", "f32"), ("u32", "f64"), ("f16", "f16"),
     ("bf16", "bf16"), ("u16", "f16"), ("s32", "bf16"), ("bf16", "s32")],
)  # fmt: skip
@pytest.mark.parametrize("combine", ["", "and.", "xor."])
def test_set(target: str, kind: str, combine: str) -> None:
    if kind[0] in "fb":
        a, b = floats(kind, 1), floats(kind, 2)
        less = [value_of(int(x), kind) < value_of(int(y), kind) for x, y in zip(a, b, strict=True)]
    else:
        a, b = integers(int(kind[1:]), 1), integers(int(kind[1:]), 2)
        less = [_number(int(x), kind) < _number(int(y), kind) for x, y in zip(a, b, strict=True)]
    sources = [a, b]
    if combine:
        c = np.random.default_rng(5).integers(0, 2, len(a)).astype(np.uint16)
        join = _COMBINE[combine[:-1]]
        less = [join(t, bool(z)) for t, z in zip(less, c, strict=True)]
        sources.append(c)
    expected = [_TRUE[target] if t else 0 for t in less]
    assert run(f"set.lt.{combine}{target}.{kind}", *sources).tolist() == expected


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("target", ["u32", "same"])
def test_set_of_pairs(kind: str, target: str) -> None:
    a, b = floats(kind, 1), floats(kind, 2)
    c = np.random.default_rng(5).integers(0, 2, len(a) // 2).astype(np.uint16)
    true = 0xFFFF if target == "u32" else _TRUE[kind]
    opcode = f"set.geu.and.{'u32' if target == 'u32' else f'{kind}x2'}.{kind}x2"
    found = run(opcode, a.view(np.uint32), b.view(np.uint32), c)
    compare = _float_compare("geu")
    expected = [
        true if compare(value_of(int(x), kind), value_of(int(y), kind)) and c[lane // 2] else 0
        for lane, (x, y) in enumerate(zip(a, b, strict=True))
    ]
    assert found.view(np.uint16).tolist() == expected


@pytest.mark.parametrize("kind", ["b16", "u32", "s64", "f32", "f64"])
def test_selp(kind: str) -> None:
    bits = int(kind[1:])
    a, b = integers(bits, 1), integers(bits, 2)
    c = integers(16, 3) & 1
    expected = [int(x) if z else int(y) for x, y, z in zip(a, b, c, strict=True)]
    assert run(f"selp.{kind}", a, b, c).tolist() == expected
    first = int(a[0])
    assert run(f"selp.{kind}", first, int(b[0]), c).tolist() == [
        first if z else int(b[0]) for z in c
    ]
    assert run(f"selp.{kind}", a, b, True).tolist() == a.tolist()


@pytest.mark.parametrize("by", ["s32", "f32", "ftz.f32"])
def test_slct(by: str) -> None:
    a, b = integers(64, 1, 512), integers(64, 2, 512)
    c = integers(32, 3, 512) if by == "s32" else floats("f32", 3)
    if by == "s32":
        chosen = [_number(int(z), "s32") >= 0 for z in c]
    else:
        chosen = [_value(int(z), "f32", "ftz" in by) >= 0 for z in c]
    expected = [int(x) if t else int(y) for x, y, t in zip(a, b, chosen, strict=True)]
    opcode = "slct.ftz.b64.f32" if "ftz" in by else f"slct.b64.{by}"
    assert run(opcode, a, b, c).tolist() == expected
