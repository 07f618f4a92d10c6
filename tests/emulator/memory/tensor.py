"""Tensor memory of one CTA: 128 lanes by 512 columns of 32 bits, allocated by columns."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tests.emulator.findings import TensorMemoryMisuse
from tests.emulator.memory.shadow import Access, Shadow

if TYPE_CHECKING:
    from tests.emulator.machine.cta import Cta
    from tests.emulator.memory.clocks import Report

LANES = 128
COLUMNS = 512
UNIT = 32

Cells = npt.NDArray[np.uint32]


class TensorMemory:
    """Data, shadow and allocation table.

    Attributes:
        cells: the data, ``[lane, column]``; made when first used, as most kernels use none.
        owner: per column, the number of its allocation, 0 where free.
        relinquished: whether the CTA has given up its right to allocate.
        waiters: warps that wait for columns.
        promised: (start, columns) that a peer's tcgen05.alloc has allocated here as well.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.owner: npt.NDArray[np.int32] = np.zeros(COLUMNS, np.int32)
        self.relinquished = False
        self._allocations: dict[int, int] = {}
        self._count = 0
        self.waiters: list[Callable[[], None]] = []
        self.promised: list[tuple[int, int]] = []

    @functools.cached_property
    def cells(self) -> Cells:
        return np.zeros((LANES, COLUMNS), np.uint32)

    @functools.cached_property
    def shadow(self) -> Shadow:
        return Shadow((LANES, COLUMNS), self.name)

    def find(self, columns: int) -> int | None:
        """First column of a free range aligned to its size; None if there is none."""
        if columns not in (32, 64, 128, 256, 512):
            raise TensorMemoryMisuse(
                f"tcgen05.alloc of {columns} columns: must be 32, 64, 128, 256 or 512"
            )
        if self.relinquished:
            raise TensorMemoryMisuse("tcgen05.alloc after tcgen05.relinquish_alloc_permit")
        for start in range(0, COLUMNS, columns):
            if not self.owner[start : start + columns].any():
                return start
        return None

    def allocate(self, start: int, columns: int) -> None:
        self._count += 1
        self.owner[start : start + columns] = self._count
        self._allocations[start] = columns
        self.shadow.mark((slice(None), slice(start, start + columns)), 0)

    def free(self, start: int, columns: int) -> None:
        """tcgen05.dealloc."""
        if self._allocations.get(start) != columns:
            live = ", ".join(f"{n} at column {s}" for s, n in sorted(self._allocations.items()))
            raise TensorMemoryMisuse(
                f"tcgen05.dealloc of {columns} columns at {start}: allocated are {live or 'none'}"
            )
        del self._allocations[start]
        self.owner[start : start + columns] = 0
        waiters, self.waiters = self.waiters, []
        for wake in waiters:
            wake()

    def order_free(self, start: int, columns: int, access: Access) -> None:
        """Everything done to the columns must happen before they are freed."""
        self.shadow.order((slice(None), slice(start, start + columns)), access)

    def check_columns(self, first: int, last: int, verb: str) -> None:
        """``[first, last)`` must lie in one allocation."""
        if first < 0 or last > COLUMNS or not self.owner[first:last].all():
            live = ", ".join(f"[{s}, {s + n})" for s, n in sorted(self._allocations.items()))
            raise TensorMemoryMisuse(
                f"{verb} of columns [{first}, {last}): allocated are {live or 'none'}"
            )
        if self.owner[first] != self.owner[last - 1]:
            raise TensorMemoryMisuse(f"{verb} of columns [{first}, {last}) spans two allocations")

    def check_cells(self, columns: Any, verb: str) -> None:
        """:meth:`check_columns` for a slice or an array of columns."""
        if isinstance(columns, slice):
            self.check_columns(columns.start, columns.stop, verb)
        else:
            self.check_columns(int(columns.min()), int(columns.max()) + 1, verb)

    def check_freed(self, cta: "Cta", report: "Report") -> None:
        if self._allocations:
            live = ", ".join(f"{n} at column {s}" for s, n in sorted(self._allocations.items()))
            report(
                TensorMemoryMisuse(
                    f"CTA {cta.position} exits with tensor memory allocated: {live} columns; "
                    "tcgen05.dealloc is missing"
                )
            )
