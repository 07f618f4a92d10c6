"""Bit counts and fields, logic, shifts and permutes, against loops over bits."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.emulator.findings import IllegalInstruction
from tests.test_emulator.isa_oracle import integers, quiet, run, run_scalar

_ONES = 0xFFFFFFFF


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def _bits(value: int, count: int) -> list[int]:
    return [value >> place & 1 for place in range(count)]


def _word(bits: list[int]) -> int:
    return sum(bit << place for place, bit in enumerate(bits))


def _bfind(a: int, kind: str, shift: bool) -> int:
    n = int(kind[1:])
    if kind[0] == "s" and a >> (n - 1):
        a ^= (1 << n) - 1
    found = next((place for place in reversed(range(n)) if a >> place & 1), None)
    if found is None:
        return _ONES
    return n - 1 - found if shift else found


def _bfe(a: int, b: int, c: int, kind: str) -> int:
    n = int(kind[1:])
    place, length = b & 255, c & 255
    top = a >> min(place + length - 1, n - 1) & 1 if kind[0] == "s" and length else 0
    return _word([a >> place + i & 1 if i < length and place + i < n else top for i in range(n)])


def _bfi(a: int, b: int, c: int, d: int, n: int) -> int:
    place, length = c & 255, d & 255
    for i in range(min(length, n)):
        if place + i < n:
            b = b & ~(1 << place + i) | (a >> i & 1) << place + i
    return b


def _szext(a: int, b: int, kind: str, clamp: bool) -> int:
    if b >= 32 and clamp:
        return a
    n = b & 31
    field = a & (1 << n) - 1
    if kind == "s32" and n and field >> (n - 1):
        field -= 1 << n
    return field & _ONES


def _bmsk(a: int, b: int, clamp: bool) -> int:
    if not clamp:
        a, b = a & 31, b & 31
    return _word([int(a <= place < a + b) for place in range(32)])


def _funnel(a: int, b: int, c: int, left: bool, clamp: bool) -> int:
    n = min(c, 32) if clamp else c & 31
    pair = b << 32 | a
    return (pair << n >> 32 if left else pair >> n) & _ONES


def _shifted(a: int, b: int, kind: str, left: bool) -> int:
    n = int(kind[1:])
    if left:
        return (a << min(b, n)) % (1 << n)
    value = _signed(a, n) if kind[0] == "s" else a
    return (value >> min(b, n)) % (1 << n)


# opcode -> (widths of the sources, plain function)
_CASES: dict[str, tuple[tuple[int, ...], Callable[..., int]]] = {}
for _n in (32, 64):
    _CASES[f"popc.b{_n}"] = (_n,), lambda a: bin(a).count("1")
    _CASES[f"clz.b{_n}"] = (_n,), lambda a, n=_n: n - len(f"{a:b}".lstrip("0"))
    _CASES[f"brev.b{_n}"] = (_n,), lambda a, n=_n: _word(_bits(a, n)[::-1])
    _CASES[f"bfi.b{_n}"] = (_n, _n, 32, 32), lambda a, b, c, d, n=_n: _bfi(a, b, c, d, n)
    for _kind in (f"u{_n}", f"s{_n}"):
        _CASES[f"bfind.{_kind}"] = (_n,), lambda a, k=_kind: _bfind(a, k, False)
        _CASES[f"bfind.shiftamt.{_kind}"] = (_n,), lambda a, k=_kind: _bfind(a, k, True)
        _CASES[f"bfe.{_kind}"] = (_n, 32, 32), lambda a, b, c, k=_kind: _bfe(a, b, c, k)
for _n in (16, 32, 64):
    _CASES[f"and.b{_n}"] = (_n, _n), lambda a, b: a & b
    _CASES[f"or.b{_n}"] = (_n, _n), lambda a, b: a | b
    _CASES[f"xor.b{_n}"] = (_n, _n), lambda a, b: a ^ b
    _CASES[f"not.b{_n}"] = (_n,), lambda a, n=_n: a ^ (1 << n) - 1
    _CASES[f"cnot.b{_n}"] = (_n,), lambda a: int(a == 0)
    _CASES[f"shl.b{_n}"] = (_n, 32), lambda a, b, n=_n: _shifted(a, b, f"b{n}", True)
    for _sign in "bus":
        _CASES[f"shr.{_sign}{_n}"] = (
            (_n, 32),
            lambda a, b, k=f"{_sign}{_n}": _shifted(a, b, k, False),
        )
for _mode in ("clamp", "wrap"):
    _clamp = _mode == "clamp"
    _CASES[f"bmsk.{_mode}.b32"] = (32, 32), lambda a, b, c=_clamp: _bmsk(a, b, c)
    for _kind in ("u32", "s32"):
        _CASES[f"szext.{_mode}.{_kind}"] = (
            (32, 32),
            lambda a, b, k=_kind, c=_clamp: _szext(a, b, k, c),
        )
    for _side in "lr":
        _CASES[f"shf.{_side}.{_mode}.b32"] = (
            (32, 32, 32),
            lambda a, b, c, left=_side == "l", clamp=_clamp: _funnel(a, b, c, left, clamp),
        )


def _small(values: np.ndarray, seed: int) -> np.ndarray:
    """Bit positions and lengths: mostly below 70, some with additional upper bits."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 70, len(values)).astype(values.dtype)
    return np.where(rng.integers(0, 5, len(values)) > 0, small, values)


@pytest.mark.parametrize("opcode", _CASES)
def test_bits(opcode: str) -> None:
    widths, plain = _CASES[opcode]
    sources = [integers(bits, seed) for seed, bits in enumerate(widths)]
    if opcode.split(".")[0] in ("bfe", "bfi", "shl", "shr", "shf", "szext", "bmsk"):
        sources[-1] = _small(sources[-1], 1)
        sources[-2] = (
            _small(sources[-2], 2) if len(sources) > 2 or "bmsk" in opcode else sources[-2]
        )
    lanes = [tuple(map(int, lane)) for lane in zip(*sources, strict=True)]
    expected = [plain(*lane) for lane in lanes]
    assert run(opcode, *sources).tolist() == expected
    scalars = [run_scalar(opcode, *lane) for lane in lanes]
    assert scalars in (expected, [None] * len(lanes))


def test_logic_of_predicates() -> None:
    a, b = np.array([False, False, True, True]), np.array([False, True, False, True])
    assert run("and.pred", a, b).tolist() == [False, False, False, True]
    assert run("or.pred", a, b).tolist() == [False, True, True, True]
    assert run("xor.pred", a, b).tolist() == [False, True, True, False]
    assert run("not.pred", a).tolist() == [True, True, False, False]
    assert run_scalar("not.pred", True) is False
    assert run_scalar("xor.pred", True, False) is True


@pytest.mark.parametrize("table", range(256))
def test_every_lop3(table: int) -> None:
    """lop3 with 0xF0, 0xCC and 0xAA yields the table itself."""
    corners = np.array([0xF0, 0xFFFFFF0F], np.uint32)
    found = run("lop3.b32", corners, 0xCC, 0xAA, table)
    assert int(found[0]) & 0xFF == table
    a, b, c = (integers(32, seed, 32) for seed in range(3))
    expected = [
        _word(
            [
                table >> (x << 2 | y << 1 | z) & 1
                for x, y, z in zip(*map(_bits32, lane), strict=True)
            ]
        )
        for lane in zip(a, b, c, strict=True)
    ]
    assert run("lop3.b32", a, b, c, table).tolist() == expected


def _bits32(value: int) -> list[int]:
    return _bits(int(value), 32)


def test_lop3_with_predicate() -> None:
    a = np.array([0, 1, 0, 1], np.uint32)
    q = np.array([False, False, True, True])
    value, p = run("lop3.or.b32", a, a, a, 0x80, q)
    assert value.tolist() == [0, 1, 0, 1]
    assert p.tolist() == [False, True, True, True]
    _, p = run("lop3.and.b32", a, a, a, 0x80, q)
    assert p.tolist() == [False, False, False, True]
    with quiet(), pytest.raises(IllegalInstruction, match=r"immLut 256, expected 0 to 255"):
        run("lop3.b32", a, a, a, 256)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, _ONES), st.integers(0, _ONES), st.integers(0, _ONES))
def test_generic_permute(a: int, b: int, c: int) -> None:
    source = (b << 32 | a).to_bytes(8, "little")
    expected = 0
    for place in range(4):
        control = c >> 4 * place & 15
        byte = source[control & 7]
        expected |= (255 * (byte >> 7) if control & 8 else byte) << 8 * place
    lanes = [np.array([value, value ^ _ONES], np.uint32) for value in (a, b, c)]
    assert int(run("prmt.b32", *lanes)[0]) == expected
    # Uniform selectors and sources take other code paths.
    assert int(run("prmt.b32", lanes[0], b, c)[0]) == expected
    assert int(run("prmt.b32", a, b, lanes[2])[0]) == expected


# d.b3 .. d.b0 for selectors 0 to 3 (PTX ISA, prmt).
_PERMUTES = {
    "f4e": ("3210", "4321", "5432", "6543"),
    "b4e": ("5670", "6701", "7012", "0123"),
    "rc8": ("0000", "1111", "2222", "3333"),
    "ecl": ("3210", "3211", "3222", "3333"),
    "ecr": ("0000", "1110", "2210", "3210"),
    "rc16": ("1010", "3232", "1010", "3232"),
}


@pytest.mark.parametrize("mode", _PERMUTES)
def test_special_permutes(mode: str) -> None:
    a, b, c = (integers(32, seed) for seed in range(3))
    expected = []
    for x, y, z in zip(a, b, c, strict=True):
        source = (int(y) << 32 | int(x)).to_bytes(8, "little")
        picks = [int(digit) for digit in _PERMUTES[mode][int(z) & 3]]
        expected.append(int.from_bytes(bytes(source[pick] for pick in picks), "big"))
    assert run(f"prmt.b32.{mode}", a, b, c).tolist() == expected
    assert int(run(f"prmt.b32.{mode}", int(a[0]), int(b[0]), c)[0]) == expected[0]


def _fns(word: int, base: int, offset: int) -> int:
    """Result of fns, computed by the loop that the PTX ISA gives."""
    if offset == 0:
        return base if word >> base & 1 else _ONES
    place, count = base, abs(offset) - 1
    while 0 <= place < 32:
        if word >> place & 1:
            if count == 0:
                return place
            count -= 1
        place += 1 if offset > 0 else -1
    return _ONES


def test_fns() -> None:
    words, bases = integers(32, 1), integers(32, 2) & 31
    offsets = np.arange(256) % 17 - 8
    expected = [_fns(*map(int, lane)) for lane in zip(words, bases, offsets, strict=True)]
    found = run("fns.b32", words, bases, offsets.astype(np.int32).view(np.uint32))
    assert found.tolist() == expected
    with pytest.raises(IllegalInstruction, match=r"base 32, expected 0 to 31"):
        run("fns.b32", words, 32, 1)
