"""Shared-memory swizzles: where a box's bytes lie, as a permutation of 8- or 16-byte units."""

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_ITEM: dict[int, Any] = {8: np.uint64, 16: np.complex128}  # moved unchanged, never computed with


class Swizzle(IntEnum):
    """Swizzle modes, numbered as in the driver (CUtensorMapSwizzle)."""

    NONE = 0
    B32 = 1
    B64 = 2
    B128 = 3
    B128_ATOM_32B = 4
    B128_ATOM_32B_FLIP_8B = 5
    B128_ATOM_64B = 6

    @property
    def span(self) -> int:
        """Bytes within which chunks are permuted; rows of a swizzled box start this far apart."""
        return (0, 32, 64, 128, 128, 128, 128)[self]

    @property
    def mode(self) -> int:
        """Encoding in the descriptor and in tensormap.replace's .swizzle_mode."""
        return min(self, 3)

    @property
    def atomicity(self) -> int:
        """Encoding in the descriptor and in tensormap.replace's .swizzle_atomicity."""
        return max(self - 3, 0)

    @property
    def period(self) -> int:
        """Bytes after which the pattern repeats (PTX ISA 5.5.7)."""
        return (16, 256, 512, 1024, 512, 512, 256)[self]


def swizzled(swizzle: Swizzle, addresses: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Swizzled addresses of the bytes at linear shared ``addresses`` (tables of PTX ISA 5.5.7)."""
    line = addresses >> 7
    if swizzle == Swizzle.B32:
        return addresses ^ (line & 1) << 4
    if swizzle == Swizzle.B64:
        return addresses ^ (line & 3) << 4
    if swizzle == Swizzle.B128:
        return addresses ^ (line & 7) << 4
    if swizzle == Swizzle.B128_ATOM_32B:
        return addresses ^ (line & 3) << 5
    if swizzle == Swizzle.B128_ATOM_32B_FLIP_8B:
        return addresses ^ (line & 3) << 5 ^ (line & 1) << 3
    if swizzle == Swizzle.B128_ATOM_64B:
        return addresses ^ (line & 1) << 6
    return addresses


@dataclass(frozen=True, eq=False, slots=True)
class Placement:
    """Placement of a box's rows in shared memory, relative to the copy's shared address.

    Attributes:
        nbytes: bytes from the shared address to the end of the copied range.
        unit: bytes that stay together, 8 or 16.
        index: place of each unit of the box in order; None for a linear layout.
        inverse: unit at each place, if ``index`` is given and the box fills all places.
    """

    nbytes: int
    unit: int
    index: npt.NDArray[np.intp] | None
    inverse: npt.NDArray[np.intp] | None

    def scatter(self, box: Bytes, window: Bytes) -> None:
        """Write the box's bytes (contiguous, in order) to the ``nbytes`` bytes of shared memory."""
        if self.index is None:
            window[...] = box.reshape(-1)
            return
        item = _ITEM[self.unit]
        units = box.reshape(-1).view(item)
        if self.inverse is not None:
            units.take(self.inverse, out=window.view(item), mode="clip")
        else:
            window.view(item)[self.index] = units

    def gather(self, window: Bytes) -> Bytes:
        """The box's bytes in order, read from the ``nbytes`` bytes of shared memory."""
        if self.index is None:
            return window.copy()
        return window.view(_ITEM[self.unit]).take(self.index).view(np.uint8)


@lru_cache(maxsize=4096)
def placement(swizzle: Swizzle, rows: int, row_bytes: int, phase: int) -> Placement:
    """Placement of ``rows`` rows from a shared address at ``phase`` in the swizzle's period.

    Swizzled rows lie a whole span apart, even if they are shorter; the bytes between rows are left
    alone (seen on an H200). Rows without swizzle are contiguous.
    """
    if swizzle == Swizzle.NONE:
        return Placement(rows * row_bytes, 16, None, None)
    unit = 8 if swizzle == Swizzle.B128_ATOM_32B_FLIP_8B else 16
    starts = phase + swizzle.span * np.arange(rows)[:, None]
    linear = starts + np.arange(0, row_bytes, unit)[None, :]
    index = ((swizzled(swizzle, linear) - phase) // unit).reshape(-1)
    places = int(index.max()) + 1
    inverse = None
    if places == index.size:
        inverse = np.empty(places, np.intp)
        inverse[index] = np.arange(places)
        inverse.setflags(write=False)
    index.setflags(write=False)
    return Placement(places * unit, unit, index, inverse)
