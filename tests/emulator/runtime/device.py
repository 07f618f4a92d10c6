"""Interface between the runtime and the device that runs the kernels."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from tests.emulator.ptx.syntax import Module

if TYPE_CHECKING:
    from tests.emulator.machine.limits import Limits

Dimensions = tuple[int, int, int]


class Device(Protocol):
    """A machine that runs PTX, such as ``tests.emulator.machine.gpu.Gpu``."""

    @property
    def limits(self) -> "Limits": ...

    def load(self, ptx: str) -> Module:
        """Load a PTX text; loading the same text again costs nothing."""

    def launch(
        self,
        module: Module,
        kernel: str,
        grid: Dimensions,
        block: Dimensions,
        cluster: Dimensions = (1, 1, 1),
        dynamic_shared: int = 0,
        parameters: list[bytes] | None = None,
        attributes: Mapping[str, int] | None = None,
        *,
        stream: int = 0,
    ) -> object:
        """Run one kernel to completion; raises EmulatorError."""

    def synchronise(self, stream: int | None = None) -> None:
        """Wait for everything launched in a stream, or in any stream."""
