"""Bit counts and fields, logic, shifts, permutes (PTX ISA, Integer Arithmetic; Logic and Shift)."""

from functools import cache, lru_cache
from typing import Any

import numpy as np

from tests.emulator.findings import IllegalInstruction
from tests.emulator.isa.opcode import Opcode
from tests.emulator.isa.semantics import (
    DTYPES,
    Function,
    Lanes,
    Lanewise,
    check_count,
    coerced,
    mask,
)

_NOT_FOUND = np.uint32(0xFFFFFFFF)
_REVERSED = np.array([int(f"{byte:08b}"[::-1], 2) for byte in range(256)], np.uint8)


def _logic(op: Opcode, count: int | None, results: int | None) -> Lanewise:
    check_count(op.text, count, (2,), "source")
    kind = op.type(("pred", "b16", "b32", "b64"))
    op.finish()
    template = f"{{0}} {dict(zip(('and', 'or', 'xor'), '&|^', strict=True))[op.family]} {{1}}"
    return Lanewise((kind, kind), (kind,), template, template)


def _not(op: Opcode, count: int | None, results: int | None) -> Lanewise:
    check_count(op.text, count, (1,), "source")
    kind = op.type(("pred", "b16", "b32", "b64"))
    op.finish()
    scalar = "not {0}" if kind == "pred" else f"{{0}} ^ {mask(int(kind[1:]))}"
    return Lanewise((kind,), (kind,), "~{0}", scalar)


def _cnot(op: Opcode, count: int | None, results: int | None) -> Lanewise:
    check_count(op.text, count, (1,), "source")
    kind = op.type(("b16", "b32", "b64"))
    op.finish()
    vector = f"({{0}} == 0).astype(np.{DTYPES[kind].__name__})"
    return Lanewise((kind,), (kind,), vector, "int({0} == 0)")


@cache
def lop3(table: int) -> Function:
    """The bitwise function of three words whose truth table is ``table``.

    The function is evaluated as an exclusive or of products (algebraic normal form).
    """
    terms = []
    for product in range(8):
        # Bit ``place`` of the table is the value at a, b, c = the place's bits, a uppermost.
        inside = [place for place in range(8) if place & product == place]
        if sum(table >> place & 1 for place in inside) % 2:
            factors = [name for bit, name in ((4, "a"), (2, "b"), (1, "c")) if product & bit]
            terms.append(" & ".join(factors) or "0xffffffff")
    body = " ^ ".join(f"({term})" for term in terms) or "0"
    function: Function = eval(f"lambda a, b, c: {body}")
    return function


# Tables that depend on fewer than three operands: the function ignores a, b or c.
_IGNORING = frozenset(
    code
    for code in range(256)
    if any(code >> gap & keep == code & keep for gap, keep in ((4, 0x0F), (2, 0x33), (1, 0x55)))
)


def _lop3(op: Opcode, count: int | None, results: int | None) -> Lanewise:
    op.type(("b32",))
    combine = op.choice(("or", "and", "none"), "none")
    op.finish()
    boolean = combine != "none"
    check_count(op.text, count, (5,) if boolean else (4,), "source")
    check_count(op.text, results, (2,) if boolean else (1,), "destination")

    def word(a: Any, b: Any, c: Any, table: Any) -> Any:
        code = int(np.ravel(table)[0])
        if not 0 <= code <= 255:
            raise IllegalInstruction(f"{op.text}: immLut {code}, expected 0 to 255 (PTX ISA, lop3)")
        value = lop3(code)(a, b, c)
        if code in _IGNORING:  # some tables ignore the operands that have lanes
            shape = np.broadcast(a, b, c).shape
            value = np.full(shape, value, np.uint32)
        return value

    def with_predicate(a: Any, b: Any, c: Any, table: Any, other: Any) -> Any:
        value = word(a, b, c, table)
        found = value != 0
        return value, (found | other) if combine == "or" else (found & other)

    sources = ("b32", "b32", "b32", "b32")
    if boolean:
        return Lanewise((*sources, "pred"), ("b32", "pred"), with_predicate)
    return Lanewise(sources, ("b32",), word)


def _shift(op: Opcode, count: int | None, results: int | None) -> Lanewise:
    """Semantics of shifts left and right; amounts are clamped at the width, as in numpy."""
    check_count(op.text, count, (2,), "source")
    kinds = [f"b{bits}" for bits in (16, 32, 64)]
    if op.family == "shr":
        kinds += [f"{sign}{bits}" for sign in "us" for bits in (16, 32, 64)]
    kind = op.type(kinds)
    op.finish()
    bits = int(kind[1:])
    name = kind if kind[0] == "s" else f"b{bits}"
    sign, ufunc = ("<<", "left_shift") if op.family == "shl" else (">>", "right_shift")
    if bits == 32:
        # A signed amount keeps int32 >> amount in 32 bits; a negative amount counts as too large.
        return Lanewise(
            (name, "s32" if kind[0] == "s" else "b32"),
            (name,),
            f"{{0}} {sign} {{1}}",
            _shift_scalar(kind, op.family),
        )
    wide = f"{'int' if kind[0] == 's' else 'uint'}{max(bits, 32)}"
    vector = f"np.{ufunc}({{0}}, {{1}}, dtype=np.{wide})"
    if kind == "s16":
        vector = f"np.{ufunc}({{0}}, {{1}}, dtype=np.int64)"
    if bits == 16:
        vector += f".astype(np.{DTYPES[name].__name__})"
    return Lanewise((name, "b32"), (name,), vector, _shift_scalar(kind, op.family))


def _shift_scalar(kind: str, family: str) -> str:
    bits = int(kind[1:])
    if family == "shl":
        return f"{{0}} << min({{1}}, {bits}) & {mask(bits)}"
    if kind[0] == "s":
        top = f"{1 << (bits - 1):#x}"
        return f"(({{0}} ^ {top}) - {top} >> min({{1}}, {bits})) & {mask(bits)}"
    return f"{{0}} >> min({{1}}, {bits})"


def _funnel(op: Opcode, count: int | None, results: int | None) -> Lanewise:
    check_count(op.text, count, (3,), "source")
    op.type(("b32",))
    left = op.choice(("l", "r")) == "l"
    clamp = op.choice(("clamp", "wrap")) == "clamp"
    op.finish()

    def run(a: Any, b: Any, c: Any) -> Lanes:
        amount = np.minimum(c, 32) if clamp else c & 31
        pair = np.left_shift(b, 32, dtype=np.uint64) | a
        shifted = (pair << amount) >> 32 if left else pair >> amount
        result: Lanes = shifted.astype(np.uint32)
        return result

    amount = "min({2}, 32)" if clamp else "({2} & 31)"
    scalar = f"(({{1}} << 32 | {{0}}) << {amount} >> 32) & 0xffffffff"
    if not left:
        scalar = f"({{1}} << 32 | {{0}}) >> {amount} & 0xffffffff"
    sources = ("b32", "b32", "u32")
    return Lanewise(sources, ("b32",), coerced(run, sources), scalar)


def _popc(op: Opcode, count: int | None, results: int | None) -> Lanewise:
    check_count(op.text, count, (1,), "source")
    kind = op.type(("b32", "b64"))
    op.finish()
    vector = "np.bitwise_count({0}).astype(np.uint32)"
    return Lanewise((kind,), ("u32",), vector, "int.bit_count({0})")


def _length(value: Any) -> Lanes:
    """Number of bits needed to represent each unsigned word."""
    if value.dtype.itemsize == 8:
        high = (value >> 32).astype(np.float64)
        low = (value & 0xFFFFFFFF).astype(np.float64)
        return np.where(high != 0, np.frexp(high)[1] + 32, np.frexp(low)[1])
    exponents: Lanes = np.frexp(value.astype(np.float64))[1]
    return exponents


def _clz(op: Opcode, count: int | None, results: int | None) -> Lanewise:
    check_count(op.text, count, (1,), "source")
    kind = op.type(("b32", "b64"))
    op.finish()
    bits = int(kind[1:])
    return Lanewise(
        (kind,),
        ("u32",),
        coerced(lambda a: (bits - _length(a)).astype(np.uint32), (kind,)),
        f"{bits} - int.bit_length({{0}})",
    )


def _bfind(op: Opcode, count: int | None, results: int | None) -> Lanewise:
    check_count(op.text, count, (1,), "source")
    kind = op.type(("u32", "u64", "s32", "s64"))
    shift_amount = op.flag("shiftamt")
    op.finish()
    bits = int(kind[1:])

    def run(a: Any) -> Lanes:
        if kind[0] == "s":
            a = np.where(a < 0, ~a, a).view(DTYPES[f"u{bits}"])
        place = _length(a) - 1
        found = bits - 1 - place if shift_amount else place
        return np.where(place < 0, _NOT_FOUND, found.astype(np.uint32))

    return Lanewise((kind,), ("u32",), coerced(run, (kind,)))


def _fns(op: Opcode, count: int | None, results: int | None) -> Lanewise:
    """Semantics of fns: find the n-th set bit. Evaluated lane by lane, because fns is rare."""
    check_count(op.text, count, (3,), "source")
    op.type(("b32",))
    op.finish()

    def single(word: int, base: int, offset: int) -> int:
        if base > 31:
            raise IllegalInstruction(f"{op.text}: base {base}, expected 0 to 31 (PTX ISA, fns)")
        step = -1 if offset < 0 else 1
        places = range(base, 32) if step > 0 else range(base, -1, -1)
        found = [place for place in places if word >> place & 1]
        if offset == 0:
            return base if word >> base & 1 else 0xFFFFFFFF
        return found[abs(offset) - 1] if len(found) >= abs(offset) else 0xFFFFFFFF

    def run(a: Any, b: Any, c: Any) -> Lanes:
        lanes = np.broadcast(a, b, c)
        return np.array([single(*map(int, lane)) for lane in lanes], np.uint32)

    sources = ("b32", "u32", "s32")
    return Lanewise(sources, ("b32",), coerced(run, sources))


def _brev(op: Opcode, count: int | None, results: int | None) -> Lanewise:
    check_count(op.text, count, (1,), "source")
    kind = op.type(("b32", "b64"))
    op.finish()
    dtype = DTYPES[kind]

    def run(a: Any) -> Lanes:
        reversed_bits: Lanes = _REVERSED[np.atleast_1d(a).byteswap().view(np.uint8)].view(dtype)
        return reversed_bits

    return Lanewise((kind,), (kind,), coerced(run, (kind,)))


def _ones(length: Any) -> Lanes:
    """uint64 words with the given number of low bits set; numpy clamps shifts at 64."""
    return np.left_shift(np.uint64(1), length, dtype=np.uint64) - np.uint64(1)


def _bfe(op: Opcode, count: int | None, results: int | None) -> Lanewise:
    check_count(op.text, count, (3,), "source")
    kind = op.type(("u32", "u64", "s32", "s64"))
    op.finish()
    dtype = DTYPES[kind]

    def unsigned(a: Any, b: Any, c: Any) -> Lanes:
        field = np.right_shift(a, b & 255, dtype=np.uint64) & _ones(c & 255)
        result: Lanes = field.astype(dtype)
        return result

    def signed(a: Any, b: Any, c: Any) -> Lanes:
        length = c & 255
        shifted = np.right_shift(a, b & 255, dtype=np.int64)
        spare = 64 - np.minimum(length, 64).astype(np.int64)
        field: Lanes = (shifted << spare) >> spare  # numpy gives 0 for shifts by 64
        return field.astype(dtype)

    sources = (kind, "u32", "u32")
    scalar = None
    if kind[0] == "u":
        scalar = "{0} >> ({1} & 255) & (1 << ({2} & 255)) - 1"
    return Lanewise(
        sources, (kind,), coerced(signed if kind[0] == "s" else unsigned, sources), scalar
    )


def _bfi(op: Opcode, count: int | None, results: int | None) -> Lanewise:
    check_count(op.text, count, (4,), "source")
    kind = op.type(("b32", "b64"))
    op.finish()
    dtype = DTYPES[kind]

    def run(a: Any, b: Any, c: Any, d: Any) -> Lanes:
        place = c & 255
        field = np.left_shift(_ones(d & 255), place, dtype=np.uint64)
        moved = np.left_shift(a, place, dtype=np.uint64)
        result: Lanes = ((b & ~field) | (moved & field)).astype(dtype)
        return result

    sources = (kind, kind, "u32", "u32")
    return Lanewise(sources, (kind,), coerced(run, sources))


def _szext(op: Opcode, count: int | None, results: int | None) -> Lanewise:
    check_count(op.text, count, (2,), "source")
    kind = op.type(("u32", "s32"))
    clamp = op.choice(("clamp", "wrap")) == "clamp"
    op.finish()

    def run(a: Any, b: Any) -> Lanes:
        length = np.minimum(b, 32) if clamp else b & 31
        spare = 64 - length.astype(np.int64)
        if kind == "u32":
            return (a.astype(np.uint64) & _ones(length)).astype(np.uint32)
        extended: Lanes = (a.astype(np.int64) << spare) >> spare
        return extended.astype(np.int32)

    sources = (kind, "u32")
    return Lanewise(sources, (kind,), coerced(run, sources))


def _bmsk(op: Opcode, count: int | None, results: int | None) -> Lanewise:
    check_count(op.text, count, (2,), "source")
    op.type(("b32",))
    clamp = op.choice(("clamp", "wrap")) == "clamp"
    op.finish()

    def run(a: Any, b: Any) -> Lanes:
        place, length = (np.minimum(a, 32), np.minimum(b, 32)) if clamp else (a & 31, b & 31)
        result: Lanes = np.left_shift(_ones(length), place, dtype=np.uint64).astype(np.uint32)
        return result

    return Lanewise(("b32", "b32"), ("b32",), coerced(run, ("b32", "b32")))


# Source bytes of d.b0 .. d.b3 for each value of c[1:0] (PTX ISA, prmt).
_PERMUTE_MODES = {
    "f4e": ((0, 1, 2, 3), (1, 2, 3, 4), (2, 3, 4, 5), (3, 4, 5, 6)),
    "b4e": ((0, 7, 6, 5), (1, 0, 7, 6), (2, 1, 0, 7), (3, 2, 1, 0)),
    "rc8": ((0, 0, 0, 0), (1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3)),
    "ecl": ((0, 1, 2, 3), (1, 1, 2, 3), (2, 2, 2, 3), (3, 3, 3, 3)),
    "ecr": ((0, 0, 0, 0), (0, 1, 1, 1), (0, 1, 2, 2), (0, 1, 2, 3)),
    "rc16": ((0, 1, 0, 1), (2, 3, 2, 3), (0, 1, 0, 1), (2, 3, 2, 3)),
}


def _byte_pairs(a: Any, b: Any) -> Lanes:
    """The 8 bytes of b:a in each lane, low byte first."""
    rows = max(1 if word.__class__ is int else word.size for word in (a, b))
    pairs = np.empty((rows, 2), np.uint32)
    pairs[:, 0] = a
    pairs[:, 1] = b
    return pairs.view(np.uint8)


@lru_cache(maxsize=1024)
def _selectors(control: int, rows: int) -> tuple[Lanes, Lanes | None]:
    """Byte indices of a generic permute in ``rows`` lanes of 8 bytes; mask of sign selectors."""
    nibbles = np.array([control >> shift & 15 for shift in (0, 4, 8, 12)])
    signs = nibbles > 7
    return np.arange(0, 8 * rows, 8)[:, None] + (nibbles & 7), signs if signs.any() else None


def _permute(a: Any, b: Any, c: Any) -> Lanes:
    source = _byte_pairs(a, b)
    if c.__class__ is int or c.size == 1:
        places, signs = _selectors(int(c if c.__class__ is int else c[0]), len(source))
        found = source.take(places)  # bytes of all lanes
    else:
        nibbles = c[:, None] >> np.array([0, 4, 8, 12], np.uint32) & 15
        signs = nibbles > 7
        source = np.broadcast_to(source, (len(c), 8))
        found = np.take_along_axis(source, (nibbles & 7).astype(np.intp), axis=1)
    if signs is not None:
        found = np.where(signs, np.where(found > 127, 255, 0), found).astype(np.uint8)
    result: Lanes = found.view(np.uint32)[:, 0]
    return result


def _permute_mode(mode: str) -> Function:
    table = np.array(_PERMUTE_MODES[mode])

    def run(a: Any, b: Any, c: Any) -> Lanes:
        places = table[np.atleast_1d(c) & 3]
        source = np.broadcast_to(_byte_pairs(a, b), (max(len(places), np.size(a), np.size(b)), 8))
        found = np.take_along_axis(source, np.broadcast_to(places, (len(source), 4)), axis=1)
        result: Lanes = found.view(np.uint32)[:, 0]
        return result

    return run


def _prmt(op: Opcode, count: int | None, results: int | None) -> Lanewise:
    check_count(op.text, count, (3,), "source")
    mode = op.choice((*_PERMUTE_MODES, "generic"), "generic")
    op.type(("b32",))
    op.finish()
    run = _permute if mode == "generic" else _permute_mode(mode)
    return Lanewise(("b32", "b32", "b32"), ("b32",), run)


FAMILIES = {
    "and": _logic,
    "or": _logic,
    "xor": _logic,
    "not": _not,
    "cnot": _cnot,
    "lop3": _lop3,
    "shl": _shift,
    "shr": _shift,
    "shf": _funnel,
    "popc": _popc,
    "clz": _clz,
    "bfind": _bfind,
    "fns": _fns,
    "brev": _brev,
    "bfe": _bfe,
    "bfi": _bfi,
    "szext": _szext,
    "bmsk": _bmsk,
    "prmt": _prmt,
}
