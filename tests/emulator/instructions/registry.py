"""Table of the instruction families, and of the functions that generated code may call."""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from tests.emulator.codegen import Emitter
    from tests.emulator.ptx.syntax import Instruction

    Emit = Callable[[Emitter, Instruction], None]

FAMILIES: dict[str, "Emit"] = {}
RUNTIME: dict[str, object] = {}

F = TypeVar("F", bound=Callable[..., object])


def family(*names: str) -> Callable[["Emit"], "Emit"]:
    """Register the emitter of all instructions whose first part is one of ``names``."""

    def register(emit: "Emit") -> "Emit":
        for name in names:
            FAMILIES[name] = emit
        return emit

    return register


def runtime(function: F) -> F:
    """Make ``function`` callable from generated code under its own name."""
    RUNTIME[function.__name__] = function
    return function
