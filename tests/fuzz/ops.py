"""The fuzzer's interface of an op: how to draw its arguments, and how to judge its result."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.fuzz.draw import Draw

Given = dict[str, Any]


@dataclass(frozen=True)
class Op:
    """An op of ``nvfp4_kernels``.

    Attributes:
        draw: draws arguments from the op's documented domain.
        check: raises ``Wrong`` unless the formula explains the result. Its arguments are the op's
            arguments before the call, the result, and the op's arguments after the call, and
            nothing else, so that it judges a call with any arguments.
        emulated: whether there is an sm_100 kernel that the fuzzer runs.
        kernel_check: check of the kernel's result, where the kernel rounds a value that the
            reference does not; None: ``check``.
        refused: name of the argument that has to be refused among the drawn arguments, or None; the
            second argument tells whether the sm_100 kernel runs. None: a reference may refuse
            nothing, a kernel any argument by name.
    """

    draw: Callable[[Draw], Given]
    check: Callable[[Given, Any, Given], None]
    emulated: bool = True
    kernel_check: Callable[[Given, Any, Given], None] | None = None
    refused: Callable[[Given, bool], str | None] | None = None
