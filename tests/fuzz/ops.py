"""What the fuzzer knows of an op: how to draw arguments, and how to judge what it made of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.fuzz.draw import Draw

Given = dict[str, Any]


@dataclass(frozen=True)
class Op:
    """An op of ``nvfp4_kernels``.

    Attributes:
        draw: arguments from the domain that the op documents.
        check: raises ``Wrong`` unless the formula explains the result. It is told the arguments as
            they were before the call, the result, and the arguments as they are now, and knows
            nothing else, so that it judges a call with any arguments.
        emulated: whether there is an sm_100 kernel that the fuzzer runs.
        kernel_check: what judges its result, where a kernel rounds what the reference does not;
            None: ``check``.
        refused: names the argument that has to be refused of arguments that ``draw`` gives, None
            if there is none; it is told whether the sm_100 kernel runs. None: of a reference
            nothing, and of a kernel anything by name.
    """

    draw: Callable[[Draw], Given]
    check: Callable[[Given, Any, Given], None]
    emulated: bool = True
    kernel_check: Callable[[Given, Any, Given], None] | None = None
    refused: Callable[[Given, bool], str | None] | None = None
