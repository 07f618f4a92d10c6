"""f16, bf16 and their pairs (PTX ISA, Half Precision Floating Point); NaN results are canonical."""

from typing import Any

import numpy as np

from tests.emulator.isa.extreme import min_max
from tests.emulator.isa.flush import canonical_f16, clamp_unit, flush_f16, relu
from tests.emulator.isa.narrow import f32_to_bf16
from tests.emulator.isa.opcode import Opcode
from tests.emulator.isa.rounding import flush_wide, from_bf16, to_bf16, to_odd, two_sum
from tests.emulator.isa.semantics import Function, Lanes, Lanewise, check_count, elementwise

TYPES = ("f16", "bf16", "f16x2", "bf16x2")
_NUMPY = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
_OOB_NAN = 0x7FF7  # f16 and bf16, as seen on sm_90 (PTX ISA, OOB-NaN)


def _wide_f16(name: str) -> Function:
    """f16 arithmetic in float64: an inexact float64 result is far from every float16 midpoint."""
    if name == "fma":
        return lambda a, b, c: np.multiply(a, b, dtype=np.float64) + c
    return lambda a, b: _NUMPY[name](a, b, dtype=np.float64)


def _wide_bf16(name: str) -> Function:
    """bf16 arithmetic with a wide result, to be rounded once more.

    Rounding sums and products of 8-bit significands through float32 is safe; a fused multiply-add
    is rounded to odd in float64.
    """

    def run(*patterns: Any) -> Lanes:
        values = [from_bf16(p) for p in patterns]
        if name == "fma":
            a, b, c = (value.astype(np.float64) for value in values)
            return to_odd(*two_sum(a * b, c))
        result: Lanes = _NUMPY[name](*values)
        return result

    return run


def packed_form(kind: str, function: Function, places: int) -> Lanewise:
    """Instruction with ``places`` sources; ``function`` takes float16 values or bf16 patterns."""
    element = np.float16 if kind.startswith("f16") else np.uint16
    name, word = ("b32", np.uint32) if kind.endswith("x2") else ("b16", np.uint16)
    return Lanewise((name,) * places, (name,), elementwise(function, word, element))


def _f16(name: str, *, ftz: bool, sat: bool, negative_to_zero: bool) -> Function:
    inner = _wide_f16(name)

    def run(*values: Any) -> Lanes:
        found = inner(*(map(flush_f16, values) if ftz else values))
        if ftz:
            found = flush_wide(found, "f16", "rn")
        found = found.astype(np.float16)
        if sat:
            found = clamp_unit(found)
        if negative_to_zero:
            found = relu(found)
        return canonical_f16(found)

    return run


def _bf16(name: str, *, negative_to_zero: bool) -> Function:
    inner = _wide_bf16(name)

    def run(*values: Any) -> Lanes:
        found = inner(*values)
        if name != "fma":
            return f32_to_bf16(found)
        return to_bf16(relu(found) if negative_to_zero else found, "rn")

    return run


def _out_of_bounds(function: Function) -> Function:
    """``.oob``: +0 where a factor is the NaN of an out-of-bounds load; NaN addends stay NaN."""

    def run(*values: Any) -> Lanes:
        result = function(*values)
        first, second = (value.view(np.uint16) == _OOB_NAN for value in values[:2])
        return np.where(first | second, result.dtype.type(0), result)

    return run


def _arithmetic(op: Opcode, count: int | None, results: int | None) -> Lanewise:
    fused = op.family == "fma"
    places = 3 if fused else 2
    check_count(op.text, count, (places,), "source")
    kind = op.type(TYPES)
    op.choice(("rn",), None if fused else "rn")
    binary16 = kind.startswith("f16")
    outside = fused and op.flag("oob")
    negative_to_zero = fused and op.flag("relu")
    ftz = binary16 and not outside and op.flag("ftz")
    sat = binary16 and not outside and not negative_to_zero and op.flag("sat")
    op.finish()
    if binary16:
        function = _f16(op.family, ftz=ftz, sat=sat, negative_to_zero=negative_to_zero)
    else:
        function = _bf16(op.family, negative_to_zero=negative_to_zero)
    return packed_form(kind, _out_of_bounds(function) if outside else function, places)


def _sign(op: Opcode, count: int | None, results: int | None) -> Lanewise:
    """Semantics of abs and neg."""
    check_count(op.text, count, (1,), "source")
    kind = op.type(TYPES)
    ftz = kind.startswith("f16") and op.flag("ftz")
    op.finish()
    function = np.abs if op.family == "abs" else np.negative
    if kind.startswith("bf16"):
        return packed_form(kind, lambda a: to_bf16(function(from_bf16(a)), "rn"), 1)
    flush = flush_f16 if ftz else np.asarray
    return packed_form(kind, lambda a: canonical_f16(flush(function(a))), 1)


def _extreme(op: Opcode, count: int | None, results: int | None) -> Lanewise:
    kind = op.type(TYPES)
    return min_max(op, count, kind)


FAMILIES = {
    "add": _arithmetic,
    "sub": _arithmetic,
    "mul": _arithmetic,
    "fma": _arithmetic,
    "abs": _sign,
    "neg": _sign,
    "min": _extreme,
    "max": _extreme,
}
