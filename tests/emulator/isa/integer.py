"""Integer arithmetic (PTX ISA, Integer Arithmetic and Extended-Precision Integer Arithmetic)."""

from typing import Any

import numpy as np

from tests.emulator.isa.opcode import Opcode
from tests.emulator.isa.semantics import (
    DTYPES,
    Function,
    Lanes,
    Lanewise,
    check_count,
    coerced,
    elementwise,
    mask,
    signed,
)

TYPES = tuple(f"{sign}{bits}" for sign in "us" for bits in (16, 32, 64))
_PAIRS = ("u16x2", "s16x2")


def _unsigned(kind: str) -> str:
    return f"u{kind[1:]}"


def _parts(kind: str) -> tuple[bool, int]:
    """Signedness and width of an integer type."""
    return kind[0] == "s", int(kind[1:])


def _number(place: int, kind: str) -> str:
    """Scalar template of the value of source ``place``."""
    is_signed, bits = _parts(kind)
    return signed(place, bits) if is_signed else f"{{{place}}}"


def _saturate(values: Lanes) -> Lanes:
    return np.clip(values, -(1 << 31), (1 << 31) - 1).astype(np.int32)


_SATURATED_SCALAR = "max(-0x80000000, min(0x7fffffff, {})) & 0xffffffff"


def _add_sub(op: Opcode, count: int | None, results: int | None) -> Lanewise:
    sign = "+" if op.family == "add" else "-"
    check_count(op.text, count, (2,), "source")
    if op.parts and op.parts[-1] in _PAIRS:
        kind = op.type(_PAIRS)
        if op.family == "sub":
            op.refuse(kind)
        op.finish()
        return Lanewise(("b32", "b32"), ("b32",), elementwise(np.add, np.uint32, np.uint16))
    kind = op.type(TYPES)
    if op.flag("cc"):
        return _carrying(op, kind, has_input=False, has_output=True)
    if kind == "s32" and op.flag("sat"):
        op.finish()
        wide = np.add if op.family == "add" else np.subtract
        scalar = f"{signed(0, 32)} {sign} {signed(1, 32)}"
        return Lanewise(
            ("s32", "s32"),
            ("s32",),
            lambda a, b: _saturate(wide(a, b, dtype=np.int64)),
            _SATURATED_SCALAR.format(scalar),
        )
    op.finish()
    name = _unsigned(kind)
    return Lanewise(
        (name, name),
        (name,),
        f"{{0}} {sign} {{1}}",
        f"({{0}} {sign} {{1}}) & {mask(_parts(kind)[1])}",
    )


def _carrying(op: Opcode, kind: str, *, has_input: bool, has_output: bool) -> Lanewise:
    """Semantics of add.cc, addc, sub.cc and subc."""
    if kind[1:] == "16":
        op.refuse(kind)
    op.finish()
    name = _unsigned(kind)
    dtype = DTYPES[name]
    subtract = op.family.startswith("sub")

    def add(a: Any, b: Any, carry: Any = False) -> Any:
        first = np.add(a, b, dtype=dtype)
        total = np.add(first, carry, dtype=dtype)
        return (total, (first < a) | (total < first)) if has_output else total

    def difference(a: Any, b: Any, borrow: Any = False) -> Any:
        first = np.subtract(a, b, dtype=dtype)
        total = np.subtract(first, borrow, dtype=dtype)
        return (total, (first > a) | (total > first)) if has_output else total

    sources = (name, name, *(["pred"] if has_input else []))
    return Lanewise(
        sources,
        (name, "pred") if has_output else (name,),
        coerced(difference if subtract else add, sources),
        carry_in=has_input,
        carry_out=has_output,
    )


def _with_carry_in(op: Opcode, count: int | None, results: int | None) -> Lanewise:
    """Sum and difference with a carry in."""
    check_count(op.text, count, (2,), "source")
    kind = op.type(("u32", "s32", "u64", "s64"))
    return _carrying(op, kind, has_input=True, has_output=op.flag("cc"))


def high_product(a: Any, b: Any, kind: str) -> Lanes:
    """Upper half of the product, in the operands' dtype."""
    is_signed, bits = _parts(kind)
    if bits < 64:
        wide = DTYPES[f"{kind[0]}{2 * bits}"]
        result: Lanes = (np.multiply(a, b, dtype=wide) >> bits).astype(DTYPES[kind])
        return result
    first, second = np.asarray(a, DTYPES[kind]), np.asarray(b, DTYPES[kind])
    low = np.uint64(0xFFFFFFFF)
    x, y = first.view(np.uint64), second.view(np.uint64)
    x0, x1, y0, y1 = x & low, x >> 32, y & low, y >> 32
    middle = x1 * y0 + (x0 * y0 >> 32)
    other = x0 * y1 + (middle & low)
    high = x1 * y1 + (middle >> 32) + (other >> 32)
    if is_signed:
        high = high - np.where(first < 0, y, 0) - np.where(second < 0, x, 0)
    return high.view(DTYPES[kind])


def _mul(op: Opcode, count: int | None, results: int | None) -> Lanewise:
    check_count(op.text, count, (2,), "source")
    kind = op.type(TYPES)
    mode = op.choice(("lo", "hi", "wide"))
    bits = _parts(kind)[1]
    product = f"{_number(0, kind)} * {_number(1, kind)}"
    if mode == "lo":
        op.finish()
        name = _unsigned(kind)
        return Lanewise((name, name), (name,), "{0} * {1}", f"{{0}} * {{1}} & {mask(bits)}")
    if mode == "wide":
        wide = _wide(op, kind)
        vector = f"np.multiply({{0}}, {{1}}, dtype=np.{DTYPES[wide].__name__})"
        return Lanewise((kind, kind), (wide,), vector, f"{product} & {mask(2 * bits)}")
    op.finish()
    return Lanewise(
        (kind, kind),
        (kind,),
        coerced(lambda a, b: high_product(a, b, kind), (kind, kind)),
        f"({product} >> {bits}) & {mask(bits)}",
    )


def _wide(op: Opcode, kind: str) -> str:
    if kind.endswith("64"):
        op.refuse(kind)
    op.finish()
    return f"{kind[0]}{2 * int(kind[1:])}"


def _low_mad(bits: int) -> Function:
    limit = (1 << bits) - 1

    def mad(a: Any, b: Any, c: Any) -> Any:
        product = a * b
        if product.__class__ is int:
            product &= limit
        return product + c

    return mad


def _mad(op: Opcode, count: int | None, results: int | None) -> Lanewise:
    check_count(op.text, count, (3,), "source")
    carry_in = op.family == "madc"
    kind = op.type(TYPES)
    mode = op.choice(("lo", "hi", "wide"))
    bits = _parts(kind)[1]
    carry_out = op.flag("cc")
    product = f"{_number(0, kind)} * {_number(1, kind)}"
    name = _unsigned(kind)
    if carry_in or carry_out:
        return _carrying_mad(op, kind, mode, carry_in=carry_in, carry_out=carry_out)
    if mode == "lo":
        op.finish()
        scalar = f"{{0}} * {{1}} + {{2}} & {mask(bits)}"
        return Lanewise((name, name, name), (name,), _low_mad(bits), scalar)
    if mode == "wide":
        wide = _wide(op, kind)
        vector = f"np.multiply({{0}}, {{1}}, dtype=np.{DTYPES[wide].__name__}) + {{2}}"
        return Lanewise(
            (kind, kind, wide), (wide,), vector, f"{product} + {{2}} & {mask(2 * bits)}"
        )
    sources = (kind, kind, kind)
    if kind == "s32" and op.flag("sat"):
        op.finish()
        return Lanewise(
            sources,
            (kind,),
            coerced(
                lambda a, b, c: _saturate(np.add(high_product(a, b, kind), c, dtype=np.int64)),
                sources,
            ),
            _SATURATED_SCALAR.format(f"({product} >> 32) + {signed(2, 32)}"),
        )
    op.finish()
    return Lanewise(
        sources,
        (kind,),
        coerced(lambda a, b, c: high_product(a, b, kind) + c, sources),
        f"({product} >> {bits}) + {{2}} & {mask(bits)}",
    )


def _carrying_mad(op: Opcode, kind: str, mode: str, *, carry_in: bool, carry_out: bool) -> Lanewise:
    """Semantics of mad.cc and madc."""
    if kind.endswith("16") or mode == "wide":
        op.refuse(mode if mode == "wide" else kind)
    op.finish()
    name = _unsigned(kind)
    dtype, own = DTYPES[name], DTYPES[kind]

    def mad(a: Any, b: Any, c: Any, carry: Any = False) -> Any:
        if mode == "lo":
            product = np.multiply(a, b, dtype=dtype)
        else:
            product = high_product(a.view(own), b.view(own), kind).view(dtype)
        first = np.add(product, c, dtype=dtype)
        total = np.add(first, carry, dtype=dtype)
        return (total, (first < product) | (total < first)) if carry_out else total

    sources = (name, name, name, *(["pred"] if carry_in else []))
    return Lanewise(
        sources,
        (name, "pred") if carry_out else (name,),
        coerced(mad, sources),
        carry_in=carry_in,
        carry_out=carry_out,
    )


def _multiply_24(op: Opcode, count: int | None, results: int | None) -> Lanewise:
    """Semantics of mul24 and mad24: 24-bit factors; bits 0..31 or 16..47 of the product."""
    adds = op.family == "mad24"
    check_count(op.text, count, (3 if adds else 2,), "source")
    kind = op.type(("u32", "s32"))
    shift = 16 if op.choice(("lo", "hi")) == "hi" else 0
    saturates = adds and kind == "s32" and shift == 16 and op.flag("sat")
    op.finish()
    is_signed = kind == "s32"

    def factor(value: Any) -> Lanes:
        wide: Lanes = value.astype(np.int64)
        return (wide << 40) >> 40 if is_signed else wide & 0xFFFFFF

    def run(a: Any, b: Any, c: Any = 0) -> Lanes:
        product = factor(a) * factor(b) >> shift
        if saturates:
            return _saturate(product.astype(np.int32).astype(np.int64) + c)
        result: Lanes = (product + c).astype(DTYPES[kind])
        return result

    sources = (kind,) * (3 if adds else 2)
    return Lanewise(sources, (kind,), coerced(run, sources))


def _sad(op: Opcode, count: int | None, results: int | None) -> Lanewise:
    check_count(op.text, count, (3,), "source")
    kind = op.type(TYPES)
    op.finish()
    sources = (kind, kind, kind)
    difference = f"abs({_number(0, kind)} - {_number(1, kind)})"
    return Lanewise(
        sources,
        (kind,),
        coerced(lambda a, b, c: np.where(a < b, b - a, a - b) + c, sources),
        f"{difference} + {{2}} & {mask(int(kind[1:]))}",
    )


def _div_rem(op: Opcode, count: int | None, results: int | None) -> Lanewise:
    """Semantics of div and rem, truncated; a zero divisor gives all ones, as on sm_90."""
    check_count(op.text, count, (2,), "source")
    kind = op.type(TYPES)
    op.finish()
    is_signed, bits = _parts(kind)
    name = _unsigned(kind)
    dtype = DTYPES[name]
    ones = dtype((1 << bits) - 1)
    remainder = op.family == "rem"

    def magnitude(value: Any) -> Lanes:
        result: Lanes = np.abs(value).view(dtype)
        return result

    def run(a: Any, b: Any) -> Lanes:
        if not is_signed:
            found = a % b if remainder else a // b
            return np.where(b == 0, ones, found)
        x, y = magnitude(a), magnitude(b)
        found = x % y if remainder else x // y
        negative = a < 0 if remainder else (a < 0) ^ (b < 0)
        return np.where(b == 0, ones, np.where(negative, 0 - found, found)).view(DTYPES[kind])

    sign = "%" if remainder else "//"
    scalar = f"{{0}} {sign} {{1}}"
    if is_signed:
        x, y = _number(0, kind), _number(1, kind)
        negative = f"{x} < 0" if remainder else f"({x} < 0) != ({y} < 0)"
        scalar = f"(-1 if {negative} else 1) * (abs({x}) {sign} abs({y})) & {mask(bits)}"
    scalar = f"({scalar} if {{1}} else {mask(bits)})"
    return Lanewise((kind, kind), (kind,), coerced(run, (kind, kind)), scalar)


def _abs_neg(op: Opcode, count: int | None, results: int | None) -> Lanewise:
    check_count(op.text, count, (1,), "source")
    kind = op.type(("s16", "s32", "s64"))
    op.finish()
    bits = int(kind[1:])
    if op.family == "abs":
        return Lanewise((kind,), (kind,), "np.abs({0})", f"abs({signed(0, bits)}) & {mask(bits)}")
    name = _unsigned(kind)
    return Lanewise((name,), (name,), "-{0}", f"-{{0}} & {mask(bits)}")


def _min_max(op: Opcode, count: int | None, results: int | None) -> Lanewise:
    check_count(op.text, count, (2,), "source")
    kind = op.type((*TYPES, *_PAIRS))
    relu = kind in ("s32", "s16x2") and op.flag("relu")
    op.finish()
    pick = np.minimum if op.family == "min" else np.maximum
    if kind in _PAIRS:
        element = np.int16 if kind[0] == "s" else np.uint16
        run: Function = (lambda a, b: np.maximum(pick(a, b), 0)) if relu else pick
        return Lanewise(("b32", "b32"), ("b32",), elementwise(run, np.uint32, element))
    vector = f"np.{pick.__name__}({{0}}, {{1}})"
    scalar = f"{op.family}({_number(0, kind)}, {_number(1, kind)})"
    if relu:
        vector, scalar = f"np.maximum({vector}, 0)", f"max({scalar}, 0)"
    if kind[0] == "s":
        scalar = f"{scalar} & {mask(int(kind[1:]))}"
    return Lanewise((kind, kind), (kind,), vector, scalar)


def _dot_product(op: Opcode, count: int | None, results: int | None) -> Lanewise:
    """dp4a and dp2a: bytes of b times bytes or halves of a, added to c."""
    check_count(op.text, count, (3,), "source")
    kinds = [op.type(("u32", "s32")), op.type(("u32", "s32"))]
    second, first = (kind[0] + "8" for kind in kinds)
    items = slice(None)
    if op.family == "dp2a":
        first = first[0] + "16"
        items = slice(0, 2) if op.choice(("lo", "hi")) == "lo" else slice(2, 4)
    op.finish()

    def split(value: Any, element: str) -> Lanes:
        words = np.atleast_1d(np.ascontiguousarray(value))
        return words.view(DTYPES[element]).reshape(words.size, -1).astype(np.int32)

    def run(a: Any, b: Any, c: Any) -> Lanes:
        products = split(a, first) * split(b, second)[:, items]
        total: Lanes = products.sum(axis=1, dtype=np.int32)
        return total.view(np.uint32) + c

    sources = ("u32", "u32", "u32")
    return Lanewise(sources, ("u32",), coerced(run, sources))


FAMILIES = {
    "add": _add_sub,
    "sub": _add_sub,
    "addc": _with_carry_in,
    "subc": _with_carry_in,
    "mul": _mul,
    "mad": _mad,
    "madc": _mad,
    "mul24": _multiply_24,
    "mad24": _multiply_24,
    "sad": _sad,
    "div": _div_rem,
    "rem": _div_rem,
    "abs": _abs_neg,
    "neg": _abs_neg,
    "min": _min_max,
    "max": _min_max,
    "dp4a": _dot_product,
    "dp2a": _dot_product,
}
