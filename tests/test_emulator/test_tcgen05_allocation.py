import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.emulator.findings import IllegalInstruction, TensorMemoryMisuse
from tests.emulator.tcgen05.allocation import (
    check_allocation,
    check_columns,
    check_deallocation,
    find_columns,
)


@pytest.mark.parametrize("columns", [0, 1, 16, 31, 33, 48, 96, 192, 384, 513, 1024])
def test_bad_column_counts(columns: int) -> None:
    with pytest.raises(IllegalInstruction, match=f"of {columns} columns: accepted are 32, 64, 128"):
        check_columns(columns)


def test_allocation_order() -> None:
    check_allocation(512, None, relinquished=False)
    check_allocation(64, 64, relinquished=False)
    check_allocation(32, 64, relinquished=False)
    with pytest.raises(
        IllegalInstruction, match=r"64 columns after one of 32: .* must not increase"
    ):
        check_allocation(64, 32, relinquished=False)
    with pytest.raises(TensorMemoryMisuse, match=r"after tcgen05\.relinquish_alloc_permit"):
        check_allocation(32, 32, relinquished=True)


def test_deallocation() -> None:
    assert check_deallocation({0: 64, 64: 32}, 64, 32) == 64
    with pytest.raises(IllegalInstruction, match="of 33 columns"):
        check_deallocation({0: 64}, 0, 33)
    with pytest.raises(TensorMemoryMisuse, match="dealloc of 0x20: allocated are 0x0, 0x40"):
        check_deallocation({64: 32, 0: 64}, 32, 32)
    with pytest.raises(TensorMemoryMisuse, match="allocated are none"):
        check_deallocation({}, 0, 32)
    with pytest.raises(TensorMemoryMisuse, match="dealloc of 0x200000: allocated are 0x0"):
        check_deallocation({0: 64}, 32 << 16, 64)
    with pytest.raises(TensorMemoryMisuse, match="of 32 columns at 0x0: 64 were allocated"):
        check_deallocation({0: 64}, 0, 32)


@given(
    operations=st.lists(
        st.tuples(st.sampled_from([32, 64, 128, 256, 512]), st.integers(0, 20)), max_size=40
    )
)
def test_allocations_never_overlap_and_the_lowest_is_taken(
    operations: list[tuple[int, int]],
) -> None:
    allocated: dict[int, int] = {}
    for columns, free in operations:
        used = {c for first, count in allocated.items() for c in range(first, first + count)}
        first = find_columns(allocated, columns)
        free_starts = [
            c for c in range(0, 512, columns) if not used.intersection(range(c, c + columns))
        ]
        assert first == (free_starts[0] if free_starts else None)
        if first is not None:
            allocated[first] = columns
        if free < len(allocated):
            del allocated[sorted(allocated)[free]]
