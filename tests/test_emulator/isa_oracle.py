"""Runner of one lane-wise instruction on bit patterns, and exact arithmetic to compare with."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np

from tests.emulator.isa.lanewise import DTYPES, Lanewise, lookup

LANES = 32
FLOATS: dict[str, Any] = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "f32": np.float32,
    "f64": np.float64,
}
# Zeros, subnormal and normal edges, one and its neighbours, the largest number, infinities, NaNs.
_PATTERNS = {
    "f16": (0, 1, 0x3FF, 0x400, 0x3C00, 0x3C01, 0x3BFF, 0x7BFF, 0x7C00, 0x7E00, 0x7C01),
    "bf16": (0, 1, 0x7F, 0x80, 0x3F80, 0x3F81, 0x3F7F, 0x7F7F, 0x7F80, 0x7FC0, 0x7F81),
    "f32": (0, 1, 0x7FFFFF, 0x800000, 0x3F800000, 0x3F800001, 0x3F7FFFFF, 0x33800000, 0x7F7FFFFF,
            0x7F800000, 0x7FC00000, 0x7F800001),
    "f64": (0, 1, (1 << 52) - 1, 1 << 52, 0x3FF << 52, 0x3FF << 52 | 1, 0x3CA << 52,
            (0x7FF << 52) - 1, 0x7FF << 52, 0x7FF8 << 48, 0x7FF << 52 | 1),
}  # fmt: skip


@contextmanager
def quiet() -> Iterator[None]:
    """Context in which instructions run without numpy's warnings."""
    with np.errstate(all="ignore"):
        yield


def integers(bits: int, seed: int, count: int = 256) -> np.ndarray:
    """Patterns of ``bits`` bits: edges, shift amounts and random numbers of all magnitudes."""
    rng = np.random.default_rng(seed)
    edges = [0, 1, 2, 31, 32, 33, 63, 64, 255, (1 << bits) - 1, (1 << bits) - 2]
    edges += [1 << (bits - 1), (1 << (bits - 1)) - 1, (1 << (bits - 1)) + 1]
    chosen = [int(edges[i % len(edges)]) % (1 << bits) for i in rng.permutation(count // 2)]
    chosen += [
        int.from_bytes(rng.bytes(bits // 8), "little") >> int(rng.integers(bits))
        for _ in range(count - count // 2)
    ]
    mixed = np.array(chosen, f"u{bits // 8}")
    return mixed[rng.permutation(count)]


def floats(kind: str, seed: int, count: int = 512) -> np.ndarray:
    """Patterns of a float type: edges of both signs, random bits, and exponents close together."""
    rng = np.random.default_rng(seed)
    bits = np.dtype(FLOATS[kind]).itemsize * 8
    sign = 1 << (bits - 1)
    edges = [*_PATTERNS[kind], *(p | sign for p in _PATTERNS[kind])]
    mantissa = {"f16": 10, "bf16": 7, "f32": 23, "f64": 52}[kind]
    centre = (1 << (bits - mantissa - 2)) - 1
    chosen = []
    for i in range(count):
        noise = int.from_bytes(rng.bytes(bits // 8), "little")
        near = max(centre + int(rng.integers(-mantissa, mantissa)), 1)
        shaped = noise & (sign | (1 << mantissa) - 1) | near << mantissa
        short = shaped & ~((1 << int(rng.integers(mantissa))) - 1)
        chosen.append((int(rng.choice(np.array(edges, "u8"))), noise, shaped, short)[i % 4])
    return np.array(chosen, f"u{bits // 8}")[rng.permutation(count)]


def present(raw: Any, name: str) -> Any:
    """Source operand as the code generator passes it: a view of an array, or a signed int."""
    dtype = np.dtype(DTYPES[name])
    if isinstance(raw, np.ndarray):
        return raw.astype(bool) if name == "pred" else raw.view(dtype)
    if name == "pred":
        return bool(raw)
    if dtype.kind == "f":
        return np.array(raw, f"u{dtype.itemsize}").view(dtype)[()]
    return int(np.array(raw, f"u{dtype.itemsize}").view(dtype)) if dtype.kind == "i" else int(raw)


def form(opcode: str, sources: int | None = None, results: int | None = None) -> Lanewise:
    found = lookup(opcode, sources, results)
    assert found is not None, opcode
    return found


def call(semantics: Lanewise, arguments: list[Any]) -> Any:
    """Call the vector form, which is a template or a function."""
    if callable(semantics.vector):
        return semantics.vector(*arguments)
    names = [f"a{i}" for i in range(len(arguments))]
    return eval(
        semantics.vector.format(*names), {"np": np, **dict(zip(names, arguments, strict=True))}
    )


def run(opcode: str, *sources: Any, count: int | None = None, results: int | None = None) -> Any:
    """Results of the vector form as unsigned patterns; a tuple if there are two.

    Args:
        opcode: the instruction.
        sources: unsigned patterns, arrays or ints; predicates as bools.
        count: number of source operands, to select a form other than the usual.
        results: number of destinations, to select a form other than the usual.
    """
    semantics = form(opcode, count, results)
    arguments = [present(s, name) for s, name in zip(sources, semantics.sources, strict=True)]
    before = [a.copy() if isinstance(a, np.ndarray) else a for a in arguments]
    with quiet():
        found = call(semantics, arguments)
    for was, argument in zip(before, arguments, strict=True):
        assert np.asarray(was).tobytes() == np.asarray(argument).tobytes(), opcode
    found = found if isinstance(found, tuple) else (found,)
    assert len(found) == len(semantics.results), opcode
    plain = []
    for array, name in zip(found, semantics.results, strict=True):
        assert isinstance(array, np.ndarray), (opcode, type(array))
        assert array.dtype == DTYPES[name], (opcode, array.dtype, name)
        plain.append(array if name == "pred" else array.view(f"u{array.dtype.itemsize}"))
    return tuple(plain) if len(plain) > 1 else plain[0]


def run_scalar(opcode: str, *sources: int | bool, results: int | None = None) -> Any:
    """Value of the scalar form, or None if the instruction has no scalar form."""
    scalar = form(opcode, results=results).scalar
    return None if scalar is None else eval(scalar.format(*(f"({s})" for s in sources)))


# Exact rounding by stepping between neighbours of the format


def value_of(pattern: int, kind: str) -> float:
    dtype = np.dtype(FLOATS[kind])
    return float(np.array(pattern, f"u{dtype.itemsize}").view(dtype))


def pattern_of(value: Any, kind: str) -> int:
    dtype = np.dtype(FLOATS[kind])
    with quiet():
        return int(np.array(value).astype(dtype).view(f"u{dtype.itemsize}"))


def largest(kind: str) -> Fraction:
    return Fraction(float(ml_dtypes.finfo(FLOATS[kind]).max))


def round_exactly(value: Fraction, kind: str, rounding: str) -> int:
    """Bit pattern of a nonzero value, rounded to the format.

    Patterns of nonnegative numbers are ordered like their values, so bisection finds the greatest
    pattern that is not above the magnitude; the next pattern is its neighbour.
    """
    bits = np.dtype(FLOATS[kind]).itemsize * 8
    magnitude, negative = abs(value), value < 0
    infinite = pattern_of(math.inf, kind)
    low, high = 0, infinite
    while high - low > 1:
        middle = (low + high) // 2
        if Fraction(value_of(middle, kind)) <= magnitude:
            low = middle
        else:
            high = middle
    below = Fraction(value_of(low, kind))
    # Rounding continues beyond the largest number, as if the next power of two were in the format.
    step = below - Fraction(value_of(low - 1, kind)) if high == infinite else 0
    above = below + step if high == infinite else Fraction(value_of(high, kind))
    if below == magnitude:
        chosen = low
    elif rounding == "rn":
        twice = 2 * magnitude - below - above
        chosen = high if twice > 0 or (twice == 0 and low % 2) else low
    else:
        away = rounding == ("rm" if negative else "rp")
        chosen = high if away else low
    return chosen | (negative << (bits - 1))


def arithmetic(
    exact: Callable[..., Fraction], plain: Callable[..., Any], kind: str, rounding: str
) -> Callable[..., int]:
    """Function of bit patterns that computes exactly, then rounds once; NaN is -1.

    Args:
        exact: function of fractions.
        plain: function of numpy float64 scalars, for infinities, NaN and the sign of zero.
        kind: format of operands and result.
        rounding: rn, rz, rm or rp.
    """

    def single(*patterns: int) -> int:
        values = [value_of(p, kind) for p in patterns]
        with quiet():
            special = float(plain(*map(np.float64, values)))
        if all(map(math.isfinite, values)):
            with suppress(ZeroDivisionError):
                result = exact(*map(Fraction, values))
                if result:
                    return round_exactly(result, kind, rounding)
        return -1 if math.isnan(special) else pattern_of(special, kind)

    return single


def is_nan(patterns: np.ndarray, kind: str) -> np.ndarray:
    with quiet():
        return np.isnan(patterns.view(FLOATS[kind]).astype(np.float64))


def same(found: np.ndarray, expected: list[int], kind: str) -> list[tuple[int, str, str]]:
    """Lanes whose patterns differ, with both patterns; an expected -1 stands for any NaN."""
    missing = is_nan(found, kind)
    return [
        (lane, hex(int(got)), hex(want))
        for lane, (got, want, nan) in enumerate(zip(found, expected, missing, strict=True))
        if (not nan if want < 0 else int(got) != want)
    ]
