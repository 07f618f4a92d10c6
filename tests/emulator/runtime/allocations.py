"""Host memory that kernels may touch: torch's live storages, looked up at each launch."""

import gc
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from tests.emulator.ptx.syntax import Module
from tests.emulator.runtime.device import Device, Dimensions

if TYPE_CHECKING:
    from tests.emulator.machine.limits import Limits


_ALIGNMENT = 16  # bytes, of a device's allocations at least


@dataclass(frozen=True)
class Range:
    """Bytes that kernels may touch, with a name for reports."""

    address: int
    nbytes: int
    name: str = ""


class Memory(Protocol):
    """The device's global memory."""

    def register(self, address: int, nbytes: int, *, name: str = "") -> object: ...
    def unregister(self, address: int) -> None: ...


class MemoryDevice(Device, Protocol):
    @property
    def memory(self) -> Memory: ...


class Allocations:
    """Synchronisation of a device's global memory with the host's allocations.

    Args:
        memory: global memory in which ranges are registered.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._known: dict[int, int] = {}

    def synchronise(self, ranges: Iterable[Range]) -> None:
        """Register exactly ``ranges``; ranges that are registered already stay as they are."""
        wanted = {r.address: r for r in ranges if r.nbytes}
        for address, nbytes in list(self._known.items()):
            if address not in wanted or wanted[address].nbytes != nbytes:
                self._memory.unregister(address)
                del self._known[address]
        for address, given in wanted.items():
            if address not in self._known:
                self._memory.register(address, given.nbytes, name=given.name)
                self._known[address] = given.nbytes


def live_storages() -> list[Range]:
    """Storages of all CPU tensors reachable from Python, except storages mapped from a file."""
    found: dict[int, Range] = {}
    # Not isinstance: there are many objects, and torch's own check runs Python code.
    kinds = _with_subclasses(torch.Tensor)
    for memoryless in (FakeTensor, FunctionalTensor):
        kinds -= _with_subclasses(memoryless)
    for item in [item for item in gc.get_objects() if type(item) in kinds]:
        if item.device.type != "cpu":
            continue
        storage = item.untyped_storage()
        address, nbytes = storage.data_ptr(), storage.nbytes()
        if address % _ALIGNMENT:
            continue  # mapped from a file, so no kernel has it as an argument
        if address and (address not in found or found[address].nbytes < nbytes):
            kind = str(item.dtype).removeprefix("torch.")
            # Register the whole storage: the tensor may be a view.
            found[address] = Range(address, nbytes, f"{kind}[{nbytes // item.element_size()}]")
    return list(found.values())


def _with_subclasses(kind: type[object]) -> set[type[object]]:
    found = {kind}
    for subclass in kind.__subclasses__():
        found |= _with_subclasses(subclass)
    return found


class WithLiveStorages:
    """A device whose kernels may touch the storage of every live CPU tensor, and nothing else.

    For programs that cannot name the tensors passed to their kernels. The host's writes to tensors
    are not tracked: all tensors count as initialised.
    """

    def __init__(self, device: MemoryDevice) -> None:
        self._device = device
        self._allocations = Allocations(device.memory)

    @property
    def limits(self) -> "Limits":
        return self._device.limits

    def load(self, ptx: str) -> Module:
        return self._device.load(ptx)

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
        self._allocations.synchronise(live_storages())
        return self._device.launch(
            module,
            kernel,
            grid,
            block,
            cluster,
            dynamic_shared,
            parameters,
            attributes,
            stream=stream,
        )

    def synchronise(self, stream: int | None = None) -> None:
        self._device.synchronise(stream)
