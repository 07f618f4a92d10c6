"""Integer arithmetic against Python's integers."""

from collections.abc import Callable

import pytest

from tests.test_emulator.isa_oracle import integers, run, run_scalar

Plain = Callable[..., int]
_TYPES = [f"{sign}{bits}" for sign in "us" for bits in (16, 32, 64)]


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def _number(value: int, kind: str) -> int:
    bits = int(kind[1:])
    return _signed(value, bits) if kind[0] == "s" else value


def _truncated(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _clamp32(value: int) -> int:
    return max(-(1 << 31), min((1 << 31) - 1, value))


def _rem(a: int, b: int, bits: int) -> int:
    return a - b * _truncated(a, b) if b else (1 << bits) - 1


# name -> operands, and the result's value as a function of the operands' values and width
_ARITHMETIC: dict[str, tuple[int, Callable[..., int]]] = {
    "add": (2, lambda a, b, n: a + b),
    "sub": (2, lambda a, b, n: a - b),
    "mul.lo": (2, lambda a, b, n: a * b),
    "mul.hi": (2, lambda a, b, n: a * b >> n),
    "mad.lo": (3, lambda a, b, c, n: a * b + c),
    "mad.hi": (3, lambda a, b, c, n: (a * b >> n) + c),
    "sad": (3, lambda a, b, c, n: abs(a - b) + c),
    "div": (2, lambda a, b, n: _truncated(a, b) if b else (1 << n) - 1),
    "rem": (2, _rem),
    "min": (2, lambda a, b, n: min(a, b)),
    "max": (2, lambda a, b, n: max(a, b)),
}
_SIGNED: dict[str, tuple[int, Callable[..., int]]] = {
    "abs": (1, lambda a, n: abs(a)),
    "neg": (1, lambda a, n: -a),
}


def _cases() -> list[tuple[str, str, int, Callable[..., int]]]:
    cases = [(n, k, count, f) for k in _TYPES for n, (count, f) in _ARITHMETIC.items()]
    return cases + [
        (n, k, count, f) for k in _TYPES if k[0] == "s" for n, (count, f) in _SIGNED.items()
    ]


@pytest.mark.parametrize(
    ("name", "kind", "count", "plain"), _cases(), ids=[f"{c[0]}.{c[1]}" for c in _cases()]
)
def test_arithmetic(name: str, kind: str, count: int, plain: Callable[..., int]) -> None:
    bits = int(kind[1:])
    sources = [integers(bits, seed) for seed in range(count)]
    expected = [
        plain(*(_number(int(v), kind) for v in lane), bits) % (1 << bits)
        for lane in zip(*sources, strict=True)
    ]
    assert run(f"{name}.{kind}", *sources).tolist() == expected
    lanes = [tuple(map(int, lane)) for lane in zip(*sources, strict=True)]
    assert [run_scalar(f"{name}.{kind}", *lane) for lane in lanes] == expected


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32"])
def test_wide_products(kind: str) -> None:
    bits = int(kind[1:])
    a, b, c = integers(bits, 1), integers(bits, 2), integers(2 * bits, 3)
    products = [_number(int(x), kind) * _number(int(y), kind) for x, y in zip(a, b, strict=True)]
    limit = 1 << 2 * bits
    assert run(f"mul.wide.{kind}", a, b).tolist() == [p % limit for p in products]
    sums = [(p + int(z)) % limit for p, z in zip(products, c, strict=True)]
    assert run(f"mad.wide.{kind}", a, b, c).tolist() == sums
    lanes = list(zip(a.tolist(), b.tolist(), c.tolist(), strict=True))
    assert [run_scalar(f"mad.wide.{kind}", *lane) for lane in lanes] == sums


@pytest.mark.parametrize(
    ("opcode", "plain"),
    [
        ("add.sat.s32", lambda a, b: _clamp32(a + b)),
        ("sub.sat.s32", lambda a, b: _clamp32(a - b)),
        ("mad.hi.sat.s32", lambda a, b, c: _clamp32((a * b >> 32) + c)),
        ("min.relu.s32", lambda a, b: max(min(a, b), 0)),
        ("max.relu.s32", lambda a, b: max(a, b, 0)),
    ],
)
def test_clamped(opcode: str, plain: Plain) -> None:
    count = plain.__code__.co_argcount
    sources = [integers(32, seed) for seed in range(count)]
    expected = [
        plain(*(_signed(int(v), 32) for v in lane)) % (1 << 32)
        for lane in zip(*sources, strict=True)
    ]
    assert run(opcode, *sources).tolist() == expected
    scalars = [run_scalar(opcode, *map(int, lane)) for lane in zip(*sources, strict=True)]
    assert scalars == expected


@pytest.mark.parametrize("kind", ["u32", "s32"])
@pytest.mark.parametrize("half", ["lo", "hi"])
def test_24_bit_products(kind: str, half: str) -> None:
    a, b, c = (integers(32, seed) for seed in range(3))

    def product(x: int, y: int) -> int:
        factors = [_number(int(v) & 0xFFFFFF, f"{kind[0]}24") for v in (x, y)]
        return factors[0] * factors[1] >> (16 if half == "hi" else 0)

    products = [product(x, y) for x, y in zip(a, b, strict=True)]
    assert run(f"mul24.{half}.{kind}", a, b).tolist() == [p % (1 << 32) for p in products]
    sums = [(p + int(z)) % (1 << 32) for p, z in zip(products, c, strict=True)]
    assert run(f"mad24.{half}.{kind}", a, b, c).tolist() == sums


def test_saturated_24_bit_sum() -> None:
    a, b, c = (integers(32, seed) for seed in range(3))
    expected = []
    for x, y, z in zip(a, b, c, strict=True):
        product = _signed(int(x) & 0xFFFFFF, 24) * _signed(int(y) & 0xFFFFFF, 24) >> 16
        upper = _signed(product % (1 << 32), 32)
        expected.append(_clamp32(upper + _signed(int(z), 32)) % (1 << 32))
    assert run("mad24.hi.sat.s32", a, b, c).tolist() == expected


@pytest.mark.parametrize("bits", [32, 64])
def test_carry_chains(bits: int) -> None:
    """Two-word sums, differences and products by way of the carry flag CC."""
    a0, a1, b0, b1 = (integers(bits, seed) for seed in range(4))
    limit = 1 << bits
    low, carry = run(f"add.cc.u{bits}", a0, b0)
    high, out = run(f"addc.cc.u{bits}", a1, b1, carry)
    under, borrow = run(f"sub.cc.u{bits}", a0, b0)
    upper, under_out = run(f"subc.cc.u{bits}", a1, b1, borrow)
    lone = run(f"addc.u{bits}", a1, b1, carry)
    alone = run(f"subc.s{bits}", a1, b1, borrow)
    for lane, words in enumerate(zip(a0, a1, b0, b1, strict=True)):
        x0, x1, y0, y1 = map(int, words)
        first, second = x1 * limit + x0, y1 * limit + y0
        total = first + second
        assert [int(low[lane]), int(high[lane])] == [total % limit, total // limit % limit]
        assert bool(out[lane]) == (total >= limit**2)
        assert int(lone[lane]) == int(high[lane])
        difference = first - second
        assert [int(under[lane]), int(upper[lane])] == [
            difference % limit,
            difference // limit % limit,
        ]
        assert bool(under_out[lane]) == (difference < 0)
        assert int(alone[lane]) == int(upper[lane])


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("half", ["lo", "hi"])
def test_multiply_add_with_carry(kind: str, half: str) -> None:
    bits = int(kind[1:])
    a, b, c = (integers(bits, seed) for seed in range(3))
    carries = integers(16, 9) & 1
    limit = 1 << bits
    found, carry = run(f"mad.{half}.cc.{kind}", a, b, c)
    chained, last = run(f"madc.{half}.cc.{kind}", a, b, c, carries)
    without = run(f"madc.{half}.{kind}", a, b, c, carries)
    for lane, (x, y, z) in enumerate(zip(a, b, c, strict=True)):
        product = _number(int(x), kind) * _number(int(y), kind)
        part = (product if half == "lo" else product >> bits) % limit
        total = part + int(z)
        assert (int(found[lane]), bool(carry[lane])) == (total % limit, total >= limit)
        total += int(carries[lane])
        assert (int(chained[lane]), bool(last[lane])) == (total % limit, total >= limit)
        assert int(without[lane]) == total % limit


@pytest.mark.parametrize("first", ["u32", "s32"])
@pytest.mark.parametrize("second", ["u32", "s32"])
def test_dot_products(first: str, second: str) -> None:
    a, b, c = (integers(32, seed) for seed in range(3))

    def items(word: int, kind: str, bits: int) -> list[int]:
        fields = [word >> place & (1 << bits) - 1 for place in range(0, 32, bits)]
        return [_number(field, f"{kind[0]}{bits}") for field in fields]

    def dot(x: list[int], y: list[int], z: int) -> int:
        return (sum(p * q for p, q in zip(x, y, strict=True)) + int(z)) % (1 << 32)

    lanes = [tuple(map(int, lane)) for lane in zip(a, b, c, strict=True)]
    fours = [dot(items(x, first, 8), items(y, second, 8), z) for x, y, z in lanes]
    assert run(f"dp4a.{first}.{second}", a, b, c).tolist() == fours
    for half, part in (("lo", slice(0, 2)), ("hi", slice(2, 4))):
        twos = [dot(items(x, first, 16), items(y, second, 8)[part], z) for x, y, z in lanes]
        assert run(f"dp2a.{half}.{first}.{second}", a, b, c).tolist() == twos


_PAIRS = [(kind, name) for kind in ("u16x2", "s16x2") for name in ("add", "min", "max")]


@pytest.mark.parametrize(("kind", "name"), [*_PAIRS, ("s16x2", "min.relu"), ("s16x2", "max.relu")])
def test_packed_pairs(kind: str, name: str) -> None:
    a, b = integers(32, 1), integers(32, 2)
    plains: dict[str, Plain] = {"add": lambda x, y: x + y, "min": min, "max": max}
    plain = plains[name[:3]]

    def half(x: int, y: int) -> int:
        value = plain(_number(x & 0xFFFF, kind[:3]), _number(y & 0xFFFF, kind[:3]))
        return (max(value, 0) if "relu" in name else value) & 0xFFFF

    expected = [
        half(int(x), int(y)) | half(int(x) >> 16, int(y) >> 16) << 16
        for x, y in zip(a, b, strict=True)
    ]
    assert run(f"{name}.{kind}", a, b).tolist() == expected
