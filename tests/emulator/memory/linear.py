"""Byte-addressed memory: shared memory of a CTA, local memory of a lane, one global allocation."""

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.emulator.findings import Misaligned, OutOfBounds
from tests.emulator.memory.clocks import HOST, NEVER
from tests.emulator.memory.shadow import ANY_LANE, Access, Shadow

Bytes = npt.NDArray[np.uint8]
Lanes = npt.NDArray[np.uint64]

_ITEM: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.dtype("V16")}


class LinearMemory:
    """``nbytes`` bytes of memory from ``base``; accesses are checked for bounds, alignment, order.

    Args:
        name: name in reports.
        base: address of the first byte, a multiple of 16.
        data: the bytes.
        granule: bytes per shadow entry, 1 or 4; no generic write of the launch is narrower.
        initialised: whether reads before any write are allowed.
        writable: whether writes are allowed.
        kind: state space, for counts.
        whole: bytes from address 0 of a CTA's shared memory to the end of ``data``; None: ``data``.
    """

    def __init__(
        self,
        name: str,
        base: int,
        data: Bytes,
        granule: int,
        initialised: bool = False,
        writable: bool = True,
        kind: str = "global",
        whole: Bytes | None = None,
    ) -> None:
        self.name = name
        self.kind = kind
        self.whole = data if whole is None else whole
        self.base = base
        self.nbytes = data.size
        self.data = data
        self.granule = granule
        self.writable = writable
        self._initialised = initialised
        self._views: dict[int, npt.NDArray[np.generic]] = {}

    @functools.cached_property
    def shadow(self) -> Shadow:
        """Shadow, created at first use; whole 16-byte items, for views at every access width."""
        granules = -(-self.nbytes // self.granule)
        return Shadow(
            -(-granules // 16) * 16, self.name, self._initialised, self.base, self.granule
        )

    @property
    def used(self) -> bool:
        """Whether a kernel has touched the memory, so that there is a shadow."""
        return "shadow" in self.__dict__

    def regrain(self, granule: int) -> None:
        """Rebuild the shadow with entries of ``granule`` bytes, keeping its contents."""
        old, before = self.granule, self.shadow if self.used else None
        self.granule = granule
        if before is None or granule == old:
            return
        del self.shadow
        if granule < old:
            writer = np.repeat(before.writer, old // granule)
            reader = np.repeat(before.reader, old // granule)
        else:
            writers = before.writer.reshape(-1, granule // old)
            writer = writers.max(1)
            if not self._initialised:
                # Reading a partly written entry is a finding, unless the overlap is a finding
                # already.
                writer[(writers == NEVER).any(1) & (writer <= HOST)] = NEVER
            # Only one of several readers is kept.
            readers = before.reader.reshape(-1, granule // old)
            reader = np.where(readers.min(1) < 0, readers.min(1), readers.max(1))
        size = min(writer.size, self.shadow.writer.size)
        self.shadow.writer[:size] = writer[:size]
        self.shadow.reader[:size] = reader[:size]

    def contains(self, address: int) -> bool:
        return 0 <= address - self.base < self.nbytes

    def _span(self, address: int, nbytes: int, verb: str) -> tuple[int, slice]:
        start = address - self.base
        if start < 0 or start + nbytes > self.nbytes:
            raise OutOfBounds(
                f"{verb} of {nbytes} bytes at {address:#x}: {self.name} is "
                f"[{self.base:#x}, {self.base + self.nbytes:#x})"
            )
        if not self.writable and verb == "write":
            raise OutOfBounds(f"write at {address:#x}: {self.name} is read-only")
        granule = self.granule
        return start, slice(start // granule, -(-(start + nbytes) // granule))

    def read(self, address: int, nbytes: int, access: Access) -> Bytes:
        """Check and record a read; returns a view of ``nbytes`` consecutive bytes."""
        start, granules = self._span(address, nbytes, "read")
        self.shadow.read(granules, access)
        return self.data[start : start + nbytes]

    def write(self, address: int, values: Bytes, access: Access) -> None:
        start, granules = self._span(address, values.size, "write")
        self.shadow.write(granules, access)
        self.data[start : start + values.size] = values

    def written_by(self, address: int, nbytes: int, lane: int) -> None:
        """Record the lane that has written a range."""
        _, granules = self._span(address, nbytes, "write")
        self.shadow.lane[granules] = lane

    def bytes_at(self, address: int, nbytes: int, verb: str) -> Bytes:
        """View of bytes without a record of the access: the caller updates the shadow."""
        start, _ = self._span(address, nbytes, verb)
        return self.data[start : start + nbytes]

    def write_window(self, address: int, nbytes: int, access: Access) -> Bytes:
        """Check and record a write of all bytes; returns a writable view of the bytes."""
        start, granules = self._span(address, nbytes, "write")
        self.shadow.write(granules, access)
        return self.data[start : start + nbytes]

    def read_chunks(self, chunks: npt.NDArray[np.intp], access: Access) -> None:
        """Check and record reads of 16-byte chunks, numbered from address 0 of the window."""
        first = (self.base & 0xFFFFFF) // 16
        lowest, highest = int(chunks.min()), int(chunks.max())
        if lowest < first or (highest + 1 - first) * 16 > self.nbytes:
            raise OutOfBounds(
                f"read of [{lowest * 16:#x}, {highest * 16 + 16:#x}): {self.name} is "
                f"[{self.base:#x}, {self.base + self.nbytes:#x})"
            )
        per_chunk = 16 // self.granule
        index = (chunks - first)[:, None] * per_chunk + np.arange(per_chunk)
        self.shadow.read(index.reshape(-1), access)

    def read_lanes(
        self,
        addresses: Lanes,
        width: int,
        access: Access,
        lanes: npt.NDArray[np.int8] | None = None,
    ) -> npt.NDArray[np.generic]:
        """Read one item of ``width`` bytes per address: an array of unsigned integers, V16 for 16.

        Args:
            addresses: one per item.
            width: bytes of an item.
            access: event of the read.
            lanes: lane that reads each item, where the order among lanes matters.
        """
        index = self._lane_index(addresses, width, "read")
        granules = self._granules(index, width)
        if lanes is not None and self.kind == "shared":
            access.lanes = np.repeat(lanes, granules.size // lanes.size)
        self.shadow.read(granules, access)
        access.lanes = ANY_LANE
        view = self._view(width)
        return view[index]

    def write_lanes(
        self,
        addresses: Lanes,
        width: int,
        values: npt.NDArray[np.generic],
        access: Access,
        lanes: npt.NDArray[np.int8] | None = None,
    ) -> None:
        index = self._lane_index(addresses, width, "write")
        granules = self._granules(index, width)
        if lanes is not None:
            access.lanes = np.repeat(lanes, granules.size // lanes.size)
            self.shadow.write(granules, access)
            self.shadow.lane[granules] = access.lanes
            access.lanes = ANY_LANE
        else:
            self.shadow.write(granules, access)
        self._view(width)[index] = values

    def _view(self, width: int) -> npt.NDArray[np.generic]:
        view = self._views.get(width)
        if view is None:
            whole = self.nbytes // width * width
            view = self._views[width] = self.data[:whole].view(_ITEM[width])
        return view

    def _lane_index(self, addresses: Lanes, width: int, verb: str) -> npt.NDArray[np.int64]:
        # Unsigned: an address below the base wraps to a huge value, so one comparison checks both
        # ends.
        offsets = addresses - self.base
        largest = int(np.maximum.reduce(offsets))
        if largest + width > self.nbytes:
            self._lane_error(addresses, width, verb)
        if not self.writable and verb == "write":
            raise OutOfBounds(f"write at {int(addresses[0]):#x}: {self.name} is read-only")
        if width == 1:
            return offsets.view(np.int64)
        if int(np.bitwise_or.reduce(addresses)) & (width - 1):
            bad = next(int(a) for a in addresses if int(a) % width)
            raise _misaligned(self.name, bad, width)
        return (offsets // width).view(np.int64)

    def _lane_error(self, addresses: Lanes, width: int, verb: str) -> None:
        end = self.base + self.nbytes
        for address in addresses.tolist():
            if not self.base <= address <= end - width:
                raise OutOfBounds(
                    f"{verb} of {width} bytes at {address:#x}: {self.name} is "
                    f"[{self.base:#x}, {end:#x})"
                )

    def _granules(self, index: npt.NDArray[np.int64], width: int) -> npt.NDArray[np.int64]:
        per_item = width // self.granule
        if per_item <= 1:
            return index if width == self.granule else index * width // self.granule
        return (index[:, None] * per_item + np.arange(per_item)).reshape(-1)


def _misaligned(name: str, address: int, width: int) -> Misaligned:
    return Misaligned(f"address {address:#x} in {name} is not a multiple of {width}")
