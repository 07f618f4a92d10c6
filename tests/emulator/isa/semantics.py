"""Representation of each instruction's semantics for the code generator."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.emulator.findings import IllegalInstruction

# 32 lanes; a uniform operand may come as a Python int or bool, or as a numpy float scalar.
Lanes = npt.NDArray[Any]
Function = Callable[..., Any]

# Presentation of an operand or result by type name: one element of this dtype for each lane.
DTYPES: dict[str, type[np.generic]] = {
    "pred": np.bool_,
    **{f"{kind}{bits}": getattr(np, f"uint{bits}") for kind in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": getattr(np, f"int{bits}") for bits in (8, 16, 32, 64)},
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
}


@dataclass(frozen=True)
class Lanewise:
    """Semantics of one instruction in each lane.

    A source register wider than the source type is presented by its low bits; a result narrower
    than its register is sign-extended (``s``) or zero-extended. ``bf16`` is passed as ``b16``,
    packed pairs as ``b32`` and ``b64``. A negated predicate ``!p`` is passed already negated.

    Attributes:
        sources: type of each source operand, a key of :data:`DTYPES`; each item of a vector operand
            counts.
        results: type of each destination; with two, the templates below give a tuple.
        vector: an expression template over ``np`` and ``{0}``, ``{1}`` .. or a function with one
            argument per source. At least one argument is an array; integers may be Python ints
            (signed for ``s``, else masked), predicates bools, floats numpy scalars. A placeholder
            is replaced by a name, a literal or a parenthesised expression. Overflow and invalid
            operations are expected: numpy's warnings have to be off (``np.errstate``).
        scalar: an expression template for sources that are all Python ints (masked unsigned, also
            for ``s``) and bools, with a result of the same kind. None: use ``vector``.
        carry_in: whether the last source is the condition code CC.CF instead of an operand (PTX
            ISA, addc).
        carry_out: whether the last result is CC.CF.
    """

    sources: tuple[str, ...]
    results: tuple[str, ...]
    vector: str | Function
    scalar: str | None = None
    carry_in: bool = False
    carry_out: bool = False


def mask(bits: int) -> str:
    """Literal with the lowest ``bits`` bits set."""
    return f"{(1 << bits) - 1:#x}"


def signed(place: int, bits: int) -> str:
    """Scalar template of source ``place`` as a signed number."""
    top = f"{1 << (bits - 1):#x}"
    return f"(({{{place}}} ^ {top}) - {top})"


def coerced(function: Function, sources: tuple[str, ...]) -> Function:
    """``function`` with Python ints and bools converted to numpy scalars of the presented dtype."""
    dtypes = [DTYPES[name] for name in sources]

    def call(*values: Any) -> Any:
        return function(
            *(
                value if isinstance(value, np.ndarray | np.generic) else dtype(value)
                for value, dtype in zip(values, dtypes, strict=True)
            )
        )

    return call


def compiled(template: str, count: int) -> Function:
    """Function compiled from a template over ``count`` sources."""
    names = [f"s{place}" for place in range(count)]
    function: Function = eval(f"lambda {', '.join(names)}: {template.format(*names)}", {"np": np})
    return function


@lru_cache(maxsize=1024)
def spread(value: int, dtype: Any) -> Lanes:
    """Array of 32 lanes that all hold ``value``."""
    lanes = np.full(32, value, dtype)
    lanes.flags.writeable = False
    return lanes


def elementwise(
    function: Function, packed: type[np.generic], element: type[np.generic]
) -> Function:
    """Function of packed registers that applies ``function`` element by element."""

    def call(*values: Any) -> Lanes:
        elements = [
            (value if isinstance(value, np.ndarray) else spread(int(value), np.dtype(packed))).view(
                element
            )
            for value in values
        ]
        result: Lanes = function(*elements).view(packed)
        return result

    return call


def check_count(text: str, came: int | None, accepted: Collection[int], what: str) -> int:
    """Check and return an instruction's number of operands: ``came``; if None, ``accepted[0]``."""
    choices = list(accepted)
    if came is None:
        return choices[0]
    if came not in choices:
        expected = " or ".join(map(str, choices))
        raise IllegalInstruction(f"{text}: {came} {what} operands, expected {expected}")
    return came
