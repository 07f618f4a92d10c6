"""Columns of one SM's tensor memory: their owners, and the permit to allocate them."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tests.emulator.tcgen05.tensor_memory_layout import COLUMNS

if TYPE_CHECKING:
    from tests.emulator.memory.tensor import TensorMemory


class Columns:
    """Allocation table that the CTAs on one SM share.

    Args:
        exclusive: whether a CTA that has allocated blocks the other CTAs from allocating until the
            CTA relinquishes its permit or exits.

    Attributes:
        holders: number of columns and owner of each allocation, by first column.
        permit: owner of the exclusive permit to allocate.
        waiters: warps that wait for columns or for the permit.
    """

    def __init__(self, exclusive: bool = False) -> None:
        self.exclusive = exclusive
        self.holders: dict[int, tuple[int, TensorMemory]] = {}
        self.permit: TensorMemory | None = None
        self.waiters: list[Callable[[], None]] = []
        self._used = 0  # a bit for each column

    def has_free(self, start: int, columns: int) -> bool:
        return not self._used >> start & (1 << columns) - 1

    def may_allocate(self, asking: "TensorMemory") -> bool:
        return self.permit is None or self.permit is asking

    def take(self, start: int, columns: int, holder: "TensorMemory") -> None:
        self.holders[start] = columns, holder
        self._used |= (1 << columns) - 1 << start
        if self.exclusive:
            self.permit = holder

    def give(self, start: int) -> None:
        columns, _ = self.holders.pop(start)
        self._used &= ~((1 << columns) - 1 << start)
        self.wake()

    def give_up_permit(self, holder: "TensorMemory") -> None:
        if self.permit is holder:
            self.permit = None
            self.wake()

    def wake(self) -> None:
        """Wake all waiters."""
        waiters, self.waiters = self.waiters, []
        for wake in waiters:
            wake()

    def holder_of(self, first: int, last: int) -> "TensorMemory | None":
        """Owner of any of the columns ``[first, last)``, or None."""
        for start, (columns, holder) in sorted(self.holders.items()):
            if start < last and first < start + columns:
                return holder
        return None


def find_columns(tables: Sequence[Columns], columns: int) -> int | None:
    """First column of the lowest range that is free on all of the SMs; None if no range is free.

    A pair of CTAs allocates the same columns in both: one address names the accumulator of the
    pair. Ranges begin at multiples of their size (assumed).
    """
    for start in range(0, COLUMNS, columns):
        if all(table.has_free(start, columns) for table in tables):
            return start
    return None
