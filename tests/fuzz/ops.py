"""Interface between the fuzzer and an op: how to draw arguments, and how to judge a result."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.fuzz.draw import Draw

Given = dict[str, Any]


@dataclass(frozen=True)
class Op:
    """An op of ``nvfp4_kernels``.

    Attributes:
        draw: function that draws arguments from the op's documented domain.
        check: function that raises ``Wrong`` unless the formula explains the result. It takes only
            the op's arguments before the call, the result, and the op's arguments after the call,
            so that it can judge a call with any arguments.
        emulated: whether there is an sm_100 kernel that the fuzzer runs.
        kernel_check: check of the kernel's result, for a kernel that rounds a value that the
            reference does not round; None: ``check``.
        refused: function that returns the name of the drawn argument that must be refused, or None;
            its second parameter tells whether the sm_100 kernel runs. Without a function, a
            reference must refuse nothing, and a kernel may refuse any argument by name.
    """

    draw: Callable[[Draw], Given]
    check: Callable[[Given, Any, Given], None]
    emulated: bool = True
    kernel_check: Callable[[Given, Any, Given], None] | None = None
    refused: Callable[[Given, bool], str | None] | None = None
