"""f16, bf16 and their pairs (PTX ISA, Half Precision Floating Point); NaN results are canonical."""

from typing import Any

import numpy as np

from tests.emulator.isa.extreme import min_max
from tests.emulator.isa.flush import canonical_f16, clamp_unit, flush_f16, relu
from tests.emulator.isa.opcode import Opcode
from tests.emulator.isa.rounding import from_bf16, to_bf16, to_odd, two_sum
from tests.emulator.isa.semantics import Function, Lanes, Lanewise, check_count, elementwise

TYPES = ("f16", "bf16", "f16x2", "bf16x2")
_NUMPY = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
_OOB_NAN = 0xFFFF  # what a TMA load fills with (PTX ISA, OOB-NaN)


def _fma_f16(a: Any, b: Any, c: Any) -> Lanes:
    # 11-bit factors: wherever the float64 sum is inexact, it is far from every float16 midpoint.
    total: Lanes = np.multiply(a, b, dtype=np.float64) + c
    return total.astype(np.float16)


def _wide_bf16(name: str) -> Function:
    """bf16 arithmetic; sums and products of 8-bit significands survive the step through float64."""

    def run(*patterns: Any) -> Lanes:
        values = [from_bf16(p).astype(np.float64) for p in patterns]
        if name == "fma":
            return to_odd(*two_sum(values[0] * values[1], values[2]))
        result: Lanes = _NUMPY[name](*values)
        return result

    return run


def packed_form(kind: str, function: Function, places: int) -> Lanewise:
    """A function of float16 values, or of bfloat16 patterns, as an instruction of ``kind``."""
    element = np.float16 if kind.startswith("f16") else np.uint16
    name, word = ("b32", np.uint32) if kind.endswith("x2") else ("b16", np.uint16)
    return Lanewise((name,) * places, (name,), elementwise(function, word, element))


def _f16(name: str, *, ftz: bool, sat: bool, negative_to_zero: bool) -> Function:
    inner: Function = _fma_f16 if name == "fma" else _NUMPY[name]

    def run(*values: Any) -> Lanes:
        found = inner(*(map(flush_f16, values) if ftz else values))
        if ftz:
            found = flush_f16(found)
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
        return to_bf16(relu(found) if negative_to_zero else found, "rn")

    return run


def _out_of_bounds(function: Function) -> Function:
    """``.oob``: +0 where a factor or the addend is the NaN of an out-of-bounds load."""

    def run(*values: Any) -> Lanes:
        result = function(*values)
        patterns = [value.view(np.uint16) for value in values]
        outside = np.logical_or.reduce([pattern == _OOB_NAN for pattern in patterns])
        return np.where(outside, result.dtype.type(0), result)

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
    """Magnitude and negation."""
    check_count(op.text, count, (1,), "source")
    kind = op.type(TYPES)
    ftz = kind.startswith("f16") and op.flag("ftz")
    op.finish()
    bits = 32 if kind.endswith("x2") else 16
    tops = 0x80008000 if bits == 32 else 0x8000
    if ftz:
        function = np.abs if op.family == "abs" else np.negative
        return packed_form(kind, lambda a: canonical_f16(flush_f16(function(a))), 1)
    change = f"{{0}} ^ {tops:#x}"
    if op.family == "abs":
        change = f"{{0}} & {~tops & (1 << bits) - 1:#x}"
    return Lanewise((f"b{bits}",), (f"b{bits}",), change, change)


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
