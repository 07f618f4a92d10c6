"""Tensor memory of one CTA: its allocated columns, each of 128 lanes."""

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tests.emulator.findings import TensorMemoryMisuse
from tests.emulator.memory.columns import Columns
from tests.emulator.memory.shadow import Access, Shadow

if TYPE_CHECKING:
    from tests.emulator.machine.cta import Cta
    from tests.emulator.memory.clocks import Report

LANES = 128
COLUMNS = 512
UNIT = 32

Cells = npt.NDArray[np.uint32]


class TensorMemory:
    """Data, shadow and allocations of one CTA.

    Args:
        cta: the CTA.
        table: allocation table of the SM.

    Attributes:
        cells: the data, ``[lane, column]``; created at first use, as most kernels use none.
        owner: per column, the number of the CTA's allocation, or 0.
        relinquished: whether the CTA has relinquished its permit to allocate.
        wanted: number of columns that a warp waits for, or 0.
        promised: (start, columns) that a peer's tcgen05.alloc has allocated here as well.
    """

    def __init__(self, cta: "Cta", table: Columns) -> None:
        self.cta = cta
        self.name = f"tensor memory of CTA {cta.position}"
        self.table = table
        self.owner: npt.NDArray[np.int32] = np.zeros(COLUMNS, np.int32)
        self.relinquished = False
        self._allocations: dict[int, int] = {}
        self._count = 0
        self.wanted = 0
        self.promised: list[tuple[int, int]] = []

    @functools.cached_property
    def cells(self) -> Cells:
        return np.zeros((LANES, COLUMNS), np.uint32)

    @functools.cached_property
    def shadow(self) -> Shadow:
        return Shadow((LANES, COLUMNS), self.name)

    def check_permit(self) -> None:
        """Refuse an allocation by a CTA that has relinquished its permit."""
        if self.relinquished:
            raise TensorMemoryMisuse("tcgen05.alloc after tcgen05.relinquish_alloc_permit")

    def relinquish(self) -> None:
        """Give up the permit to allocate, by tcgen05.relinquish_alloc_permit or the CTA's exit."""
        self.relinquished = True
        self.table.give_up_permit(self)

    def allocate(self, start: int, columns: int) -> None:
        self.table.take(start, columns, self)
        self._count += 1
        self.owner[start : start + columns] = self._count
        self._allocations[start] = columns
        self.shadow.mark((slice(None), slice(start, start + columns)), 0)

    def promise(self, start: int, columns: int) -> None:
        """Note columns that a peer has allocated here as well, for a warp waiting for columns."""
        self.promised.append((start, columns))
        self.table.wake()

    def free(self, start: int, columns: int) -> None:
        """tcgen05.dealloc: free the columns of an allocation."""
        if self._allocations.get(start) != columns:
            live = ", ".join(f"{n} at column {s}" for s, n in sorted(self._allocations.items()))
            raise TensorMemoryMisuse(
                f"tcgen05.dealloc of {columns} columns at {start}: allocated are {live or 'none'}"
            )
        del self._allocations[start]
        self.owner[start : start + columns] = 0
        self.table.give(start)

    def order_free(self, start: int, columns: int, access: Access) -> None:
        """Check that all accesses to the columns happen before the deallocation."""
        self.shadow.order((slice(None), slice(start, start + columns)), access)

    def check_columns(self, first: int, last: int, verb: str) -> None:
        """Check that ``[first, last)`` lies in one allocation."""
        if first < 0 or last > COLUMNS or not self.owner[first:last].all():
            live = ", ".join(f"[{s}, {s + n})" for s, n in sorted(self._allocations.items()))
            holder = self.table.holder_of(first, last)
            neighbour = ""
            if holder is not None and holder is not self:
                neighbour = (
                    f"; {holder.cta.name}, on the same SM, has some of the others: tcgen05.alloc "
                    "writes which ones are this CTA's"
                )
            raise TensorMemoryMisuse(
                f"{verb} of columns [{first}, {last}): allocated are {live or 'none'}{neighbour}"
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
        self.table.give_up_permit(self)
        if self._allocations:
            live = ", ".join(f"{n} at column {s}" for s, n in sorted(self._allocations.items()))
            report(
                TensorMemoryMisuse(
                    f"CTA {cta.position} exits with tensor memory allocated: {live} columns; "
                    "tcgen05.dealloc is missing"
                )
            )
