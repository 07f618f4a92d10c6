"""Traced launches of this repository's kernels, for the time model."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from tests.emulator.machine.launch import Launch
from tests.emulator.runtime import shim
from tests.emulator.timing.device import TimedGpu
from tests.emulator.timing.supply import Operand

if TYPE_CHECKING:
    from torch import Tensor


ALIGNMENT = 512  # bytes: alignment of CUDA's allocations


@dataclass(frozen=True)
class Traced:
    """A traced launch, as input of a chain.

    Attributes:
        launch: the launch with its trace.
        clusters: number of clusters of the whole grid.
        operands: operands that the launch reads, without a layer in their names.
        writes: bytes written, by name of the operand.
        registers: registers per thread.
        repeats: numbers of the traced clusters that the grid's clusters repeat in turn; all by
            default.
        label: name of the launch in timelines; empty for the kernel's name.
    """

    launch: Launch
    clusters: int
    operands: tuple[Operand, ...]
    writes: dict[str, float]
    registers: int
    repeats: tuple[int, ...] = ()
    label: str = ""


def aligned(tensor: "Tensor") -> "Tensor":
    """Copy of a tensor with a GPU allocator's alignment of 512 bytes.

    A CPU allocator aligns to 64 bytes only, so that a row of 128 bytes would straddle two lines, at
    the cost of a pass each.
    """
    import torch

    room = torch.zeros(tensor.nbytes + ALIGNMENT, dtype=torch.uint8)
    start = -room.data_ptr() % ALIGNMENT
    placed = room[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return placed.copy_(tensor)


class Tracer:
    """Emulator that is the device of CPU tensors, for kernels of one architecture; one per process.

    Args:
        arch: ``"sm_90"`` or ``"sm_100"``.
    """

    def __init__(self, arch: str) -> None:
        os.environ["NVFP4_KERNELS_CACHE"] = ""
        self._arch = arch
        self._gpu = TimedGpu()
        self._launches: list[Launch] = []
        self._gpu.finished = self._launches.append
        shim.install(self._gpu, f"{arch}a").keep_source_lines(False)
        import torch

        torch.set_num_threads(1)

    def run(
        self, act: Callable[[], object], most: int | None = None, backwards: bool = False
    ) -> tuple[Launch, int]:
        """Single launch that ``act`` makes, with its registers per thread.

        Args:
            act: function that makes new tensors only by ``new_empty``.
            most: maximum number of clusters to run, spread over the grid; None for all.
            backwards: whether the last cluster runs first.
        """
        import torch

        from nvfp4_kernels.devices import standing_in
        from nvfp4_kernels.runtime import compile as compiling
        from nvfp4_kernels.tool.static import measure_compiled

        self._launches.clear()
        functions: list[Any] = []
        self._gpu.most, self._gpu.backwards = most, backwards
        new_empty = torch.Tensor.new_empty
        placed = patch.object(
            torch.Tensor, "new_empty", lambda *given, **named: aligned(new_empty(*given, **named))
        )
        with standing_in("cpu", self._arch), self._watched(compiling, functions), placed:
            act()
        self._gpu.memory.clear()
        [launch] = self._launches
        return launch, measure_compiled(functions[-1], None).registers

    @contextmanager
    def _watched(self, compiling: Any, functions: list[Any]) -> Iterator[None]:
        """Let kernels touch the launch's tensors, and keep the compiled kernels."""
        compiled, watchers = compiling.compiled, compiling.watchers

        def recorded(*given: Any) -> Any:
            functions.append(compiled(*given))
            return functions[-1]

        compiling.compiled, compiling.watchers = recorded, [self._register]
        try:
            yield
        finally:
            compiling.compiled, compiling.watchers = compiled, watchers

    def _register(self, tensors: list["Tensor"]) -> None:
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        for address, storage in storages.items():
            if storage.nbytes():
                self._gpu.memory.register(address, storage.nbytes(), keep=storage)


def operand(name: str, tensor: "Tensor", total: float, streamed: bool = False) -> Operand:
    """Operand that stands for ``total`` bytes of the whole problem, from a traced tensor."""
    return Operand(name, tensor.data_ptr(), tensor.nbytes, total, streamed)
