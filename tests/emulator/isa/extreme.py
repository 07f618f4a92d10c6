"""min and max of floating-point types, where +0 exceeds -0 (PTX ISA, min, max)."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.emulator.isa.counting import count_nonzero
from tests.emulator.isa.flush import NAN_F16, NAN_F32, flush_f16, flush_f32
from tests.emulator.isa.opcode import Opcode
from tests.emulator.isa.rounding import from_bf16
from tests.emulator.isa.semantics import Function, Lanes, Lanewise, check_count, elementwise

_PATTERNS = {2: np.uint16, 4: np.uint32, 8: np.uint64}
_NAN: dict[int, Any] = {2: NAN_F16, 4: NAN_F32}


def extreme(name: str, *, nan: bool) -> Callable[[Any, Any], Lanes]:
    """Function that returns the lesser or greater of two arrays or scalars of one float dtype.

    Args:
        name: ``min`` or ``max``.
        nan: whether any NaN gives NaN; otherwise a number wins over NaN. A NaN result is canonical.
    """
    pick = np.fmin if name == "min" else np.fmax
    join = np.bitwise_or if name == "min" else np.bitwise_and

    def numbers(a: Any, b: Any) -> Lanes:
        found: Lanes = pick(a, b)
        if count_nonzero(found) == found.size:
            return found
        # Equal operands differ at most in the sign of zero.
        dtype = found.dtype
        bits = _PATTERNS[dtype.itemsize]
        return np.where(a == b, join(a.view(bits), b.view(bits)).view(dtype), found)

    def run(a: Any, b: Any) -> Lanes:
        found = numbers(a, b)
        missing = (a != a) | (b != b) if nan else found != found
        if count_nonzero(missing) and found.dtype.itemsize < 8:  # f64 keeps its NaN
            return np.where(missing, _NAN[found.dtype.itemsize], found)
        return found

    return run


def _exclusive_sign(function: Function) -> Function:
    """``.xorsign.abs``: extreme of the magnitudes, with the sign of the product."""

    def run(a: Any, b: Any) -> Lanes:
        found = function(np.abs(a), np.abs(b))
        signed = np.where(np.signbit(a) ^ np.signbit(b), -found, found)
        return np.where(np.isnan(found), found, signed)

    return run


def min_max(op: Opcode, count: int | None, kind: str) -> Lanewise:
    """Semantics of min and max for an already parsed floating-point type."""
    three = count == 3 and kind == "f32"
    check_count(op.text, count, (2, 3) if kind == "f32" else (2,), "source")
    nan = kind != "f64" and op.flag("NaN")
    magnitude = kind != "f64" and op.flag("abs")
    exclusive = magnitude and not three and op.flag("xorsign")
    if magnitude and not three and not exclusive:
        op.refuse("abs")  # the two-operand form takes abs with .xorsign alone
    ftz = kind in ("f32", "f16", "f16x2") and op.flag("ftz")
    op.finish()
    function: Function = extreme(op.family, nan=nan)
    if exclusive:
        function = _exclusive_sign(function)
    if three:
        pair = function
        if magnitude:
            function = lambda a, b, c: pair(pair(np.abs(a), np.abs(b)), np.abs(c))  # noqa: E731
        else:
            function = lambda a, b, c: pair(pair(a, b), c)  # noqa: E731
    if ftz:
        flush = flush_f32 if kind == "f32" else flush_f16
        plain = function
        function = lambda *v: flush(plain(*map(flush, v)))  # noqa: E731
    if kind in ("f32", "f64", "f16"):
        return Lanewise((kind,) * (3 if three else 2), (kind,), function)
    if kind.startswith("bf16"):
        plain_bf16 = function
        function = lambda a, b: to_patterns(plain_bf16(from_bf16(a), from_bf16(b)))  # noqa: E731
    element = np.uint16 if kind.startswith("bf16") else np.float16
    if kind.endswith("x2"):
        return Lanewise(("b32", "b32"), ("b32",), elementwise(function, np.uint32, element))
    return Lanewise(("b16", "b16"), ("b16",), elementwise(function, np.uint16, element))


def to_patterns(values: Lanes) -> Lanes:
    """bfloat16 patterns of float32 values that are exact in bfloat16."""
    patterns: Lanes = (values.view(np.uint32) >> 16).astype(np.uint16)
    return patterns
