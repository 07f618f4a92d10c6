"""Global memory: a table of allocations at their real addresses."""

import bisect
import ctypes

import numpy as np

from tests.emulator.findings import LaunchError, OutOfBounds
from tests.emulator.memory.linear import Bytes, Lanes, LinearMemory

GRANULE = 4


class GlobalMemory:
    """Global memory: the host allocations that kernels may touch."""

    def __init__(self) -> None:
        self._bases: list[int] = []
        self._memories: list[LinearMemory] = []
        self._kept: dict[int, object] = {}

    def register(
        self,
        address: int,
        nbytes: int,
        *,
        name: str = "",
        initialised: bool = True,
        writable: bool = True,
        keep: object = None,
    ) -> LinearMemory:
        """Make ``nbytes`` host bytes from ``address`` accessible to kernels.

        Args:
            address: address of the first byte.
            nbytes: number of bytes.
            name: name in reports.
            initialised: False for an output that the host never wrote: reading it is a finding.
            writable: False for memory that kernels may only read.
            keep: object to keep alive while the range is registered, such as the underlying array.

        Raises:
            LaunchError: the range overlaps a registered range, or does not start at a multiple of
                16.
        """
        if address % 16:
            raise LaunchError(
                f"global range at {address:#x}: must start at a multiple of 16 bytes, as the "
                "device's allocations do; register the whole storage that holds it"
            )
        at = bisect.bisect_right(self._bases, address)
        before = self._memories[at - 1] if at else None
        after = self._memories[at] if at < len(self._memories) else None
        for other in (before, after):
            if other and other.base < address + nbytes and address < other.base + other.nbytes:
                raise LaunchError(
                    f"global range [{address:#x}, {address + nbytes:#x}) overlaps {other.name}; "
                    "unregister that first"
                )
        data = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
        memory = LinearMemory(
            f"global memory{' ' + name if name else ''}",
            address,
            data,
            GRANULE,
            initialised,
            writable,
        )
        self._bases.insert(at, address)
        self._memories.insert(at, memory)
        if keep is not None:
            self._kept[address] = keep
        return memory

    def register_array(self, array: Bytes, **options: object) -> LinearMemory:
        """:meth:`register` for a contiguous numpy array."""
        return self.register(array.ctypes.data, array.nbytes, keep=array, **options)  # type: ignore[arg-type]

    def unregister(self, address: int) -> None:
        at = self._bases.index(address)
        del self._bases[at], self._memories[at]
        self._kept.pop(address, None)

    def clear(self) -> None:
        self._bases.clear()
        self._memories.clear()
        self._kept.clear()

    def at(self, address: int, verb: str = "access") -> LinearMemory:
        """The allocation that holds ``address``.

        Raises:
            OutOfBounds: there is no such allocation; the message names the nearest.
        """
        index = bisect.bisect_right(self._bases, address) - 1
        if index >= 0 and self._memories[index].contains(address):
            return self._memories[index]
        near = self._memories[max(index, 0) : index + 2]
        nearest = "; ".join(f"{m.name} is [{m.base:#x}, {m.base + m.nbytes:#x})" for m in near)
        raise OutOfBounds(
            f"{verb} at {address:#x}: no allocation there"
            + (f" (nearest: {nearest})" if nearest else " (none is registered)")
        )

    def of_lanes(
        self, addresses: Lanes, verb: str
    ) -> list[tuple[LinearMemory, "np.ndarray | None"]]:
        """Allocations that ``addresses`` fall into, each with its lanes (None: all)."""
        memory = self.at(int(addresses[0]), verb)
        inside = addresses - memory.base < memory.nbytes
        if inside.all():
            return [(memory, None)]
        found: list[tuple[LinearMemory, np.ndarray | None]] = []
        rest = np.arange(addresses.size)
        while rest.size:
            memory = self.at(int(addresses[rest[0]]), verb)
            inside = addresses[rest] - memory.base < memory.nbytes
            found.append((memory, rest[inside]))
            rest = rest[~inside]
        return found

    @property
    def nbytes(self) -> int:
        """Total bytes of all registered ranges."""
        return sum(memory.nbytes for memory in self._memories)

    def used(self) -> list[LinearMemory]:
        """The allocations that kernels have touched."""
        return [memory for memory in self._memories if memory.used]

    def regrain(self, granule: int) -> None:
        """Use shadow entries of ``granule`` bytes from here on."""
        for memory in self._memories:
            memory.regrain(granule)
