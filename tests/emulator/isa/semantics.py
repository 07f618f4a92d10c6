"""The form in which every instruction's meaning is given to the code generator."""

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

# How an operand or a result of each name is presented: one element of this dtype for each lane.
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

    A register wider than its source's name is presented by its low bits; a result narrower than its
    register is extended by its sign (``s``) or with zeros. ``bf16`` comes as ``b16``, packed pairs
    as ``b32`` and ``b64``. A negated predicate ``!p`` comes negated.

    Attributes:
        sources: how each source operand is presented, a key of :data:`DTYPES`; items of a vector
            operand count one by one.
        results: how each destination is given back; with two, the forms below give a tuple.
        vector: an expression template over ``np`` and ``{0}``, ``{1}`` .. or a function of as many
            arguments. At least one argument is an array; integer names may come as Python ints
            (signed for ``s``, else masked), predicates as bools, float names as numpy scalars. What
            replaces a placeholder is a name, a literal or in parentheses. Overflow and invalid
            operations are expected: numpy's warnings have to be off (``np.errstate``).
        scalar: an expression template for sources that are all Python ints (masked unsigned, also
            for ``s``) and bools; its value likewise. None where there is none: use ``vector``.
        carry_in: the last source is the condition code CC.CF, not an operand (PTX ISA, addc).
        carry_out: likewise the last result.
    """

    sources: tuple[str, ...]
    results: tuple[str, ...]
    vector: str | Function
    scalar: str | None = None
    carry_in: bool = False
    carry_out: bool = False


def mask(bits: int) -> str:
    """The literal of ``bits`` ones."""
    return f"{(1 << bits) - 1:#x}"


def signed(place: int, bits: int) -> str:
    """Scalar template of source ``place`` as a signed number."""
    top = f"{1 << (bits - 1):#x}"
    return f"(({{{place}}} ^ {top}) - {top})"


def coerced(function: Function, sources: tuple[str, ...]) -> Function:
    """``function`` with Python ints and bools made numpy scalars of the presented dtype."""
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
    """A template over ``count`` sources as a function."""
    names = [f"s{place}" for place in range(count)]
    function: Function = eval(f"lambda {', '.join(names)}: {template.format(*names)}", {"np": np})
    return function


@lru_cache(maxsize=1024)
def spread(value: int, dtype: Any) -> Lanes:
    """32 lanes of one packed value."""
    lanes = np.full(32, value, dtype)
    lanes.flags.writeable = False
    return lanes


def elementwise(
    function: Function, packed: type[np.generic], element: type[np.generic]
) -> Function:
    """``function`` over the elements of packed registers, lane by lane, as packed registers."""

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
    """The number of operands of an instruction: the first of ``accepted`` unless another came."""
    choices = list(accepted)
    if came is None:
        return choices[0]
    if came not in choices:
        expected = " or ".join(map(str, choices))
        raise IllegalInstruction(f"{text}: {came} {what} operands, expected {expected}")
    return came
