"""Rules of tcgen05.alloc and tcgen05.dealloc (PTX ISA 9.7.16.7.1)."""

from collections.abc import Mapping

from tests.emulator.findings import IllegalInstruction, TensorMemoryMisuse
from tests.emulator.tcgen05.tensor_memory_layout import COLUMNS, split_address

_ACCEPTED = (32, 64, 128, 256, 512)


def check_columns(columns: int) -> None:
    """Refuse a column count that is not a power of two from 32 to 512.

    Raises:
        IllegalInstruction: the count is not accepted.
    """
    if columns not in _ACCEPTED:
        raise IllegalInstruction(
            f"tcgen05.alloc/dealloc of {columns} columns: accepted are"
            f" {', '.join(map(str, _ACCEPTED))} (PTX ISA 9.7.16.7.1)"
        )


def check_allocation(columns: int, previous: int | None, *, relinquished: bool) -> None:
    """Refuse an allocation that the CTA may not make.

    Args:
        columns: requested columns.
        previous: number of columns of the CTA's last allocation, None before the first.
        relinquished: whether the CTA has given up its permit.

    Raises:
        IllegalInstruction: a bad count, or more columns than last time.
        TensorMemoryMisuse: the permit is gone.
    """
    check_columns(columns)
    if relinquished:
        raise TensorMemoryMisuse(
            "tcgen05.alloc after tcgen05.relinquish_alloc_permit: the CTA has given up the right to"
            " allocate (PTX ISA 9.7.16.7.1)"
        )
    if previous is not None and columns > previous:
        raise IllegalInstruction(
            f"tcgen05.alloc of {columns} columns after one of {previous}: the number must not"
            " increase between allocations of a CTA (PTX ISA 9.7.16.7.1)"
        )


def find_columns(allocated: Mapping[int, int], columns: int) -> int | None:
    """First column of the lowest free range, or None if the allocation has to wait.

    Args:
        allocated: column count by first column.
        columns: requested columns. Ranges begin at multiples of this number (assumed).
    """
    for first in range(0, COLUMNS, columns):
        if all(
            first + columns <= other or other + count <= first for other, count in allocated.items()
        ):
            return first
    return None


def check_deallocation(allocated: Mapping[int, int], address: int, columns: int) -> int:
    """The first column of the allocation named by an address and a count.

    Raises:
        IllegalInstruction: a bad count.
        TensorMemoryMisuse: no such allocation, or an allocation of another size.
    """
    check_columns(columns)
    lane, first = split_address(address)
    if lane or first not in allocated:
        known = ", ".join(f"{c:#x}" for c in sorted(allocated)) or "none"
        raise TensorMemoryMisuse(
            f"tcgen05.dealloc of {address:#x}: allocated are {known} (PTX ISA 9.7.16.7.1)"
        )
    if allocated[first] != columns:
        raise TensorMemoryMisuse(
            f"tcgen05.dealloc of {columns} columns at {address:#x}: {allocated[first]} were"
            " allocated there (PTX ISA 9.7.16.7.1)"
        )
    return first
