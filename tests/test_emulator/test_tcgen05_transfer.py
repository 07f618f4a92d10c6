from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.emulator.findings import IllegalInstruction, LaneReach, OutOfBounds
from tests.emulator.tcgen05.tensor_memory_layout import Address
from tests.emulator.tcgen05.transfer import (
    cells,
    check_access,
    fragment,
    load,
    reduce_columns,
    shift_down,
    store,
)
from tests.test_emulator.tcgen05_oracle import layout

COUNTS = {
    shape: [1 << i for i in range(8) if registers << i <= 128]
    for shape, registers in {
        "32x32b": 1,
        "16x64b": 1,
        "16x32bx2": 1,
        "16x128b": 2,
        "16x256b": 4,
    }.items()
}
FORMS = [(shape, count) for shape, counts in COUNTS.items() for count in counts]


@dataclass(frozen=True)
class ThreadValue:
    """CUTLASS layout: from (thread, register bit) to a bit of tensor memory, ``bits`` per lane."""

    bits: int
    thread: tuple[tuple[int, ...], tuple[int, ...]]
    value: tuple[tuple[int, ...], tuple[int, ...]]


def thread_value(shape: str, count: int) -> ThreadValue:
    """DstLayout of SM100_TMEM_LOAD_* (CUTLASS, include/cute/atom/copy_traits_sm100.hpp)."""
    match shape:
        case "32x32b":
            bits = 32 * count
            return ThreadValue(bits, ((32,), (bits,)), ((bits,), (1,)))
        case "16x32bx2":
            bits = 64 * count
            return ThreadValue(bits, ((16, 2), (bits, bits // 2)), ((bits // 2,), (1,)))
        case "16x64b":
            bits = 64 * count
            return ThreadValue(bits, ((2, 2, 8), (8 * bits, 32, bits)), ((32, count), (1, 64)))
        case "16x128b":
            bits = 128 * count
            return ThreadValue(bits, ((4, 8), (32, bits)), ((32, 2, count), (1, 8 * bits, 128)))
    bits = 256 * count
    return ThreadValue(bits, ((4, 8), (64, bits)), ((64, 2, count), (1, 8 * bits, 256)))


@pytest.mark.parametrize(("shape", "count"), FORMS)
@pytest.mark.parametrize("packed", [False, True])
def test_fragments_are_cutlass_layouts(shape: str, count: int, packed: bool) -> None:
    tv = thread_value(shape, count)
    # CUTLASS puts the second half of 16x32bx2 right behind the first.
    split = count * (2 if packed else 1) if shape == "16x32bx2" else None
    part = fragment(shape, count, packed=packed, half_split=split)
    registers = part.registers
    thread, bit = np.meshgrid(np.arange(32), np.arange(registers * 32), indexing="ij")
    place = layout(thread, *tv.thread) + layout(bit, *tv.value)
    lane, offset = np.divmod(place, tv.bits)
    # ValID of the _16b forms: 16 bits of every 32-bit column.
    column, rest = np.divmod(offset, 16) if packed else np.divmod(offset, 32)
    rng = np.random.default_rng(count)
    tensor = rng.integers(0, 2**32, (128, 512), dtype=np.uint32)
    assert part.width == int(column.max()) + 1
    expected = np.zeros((registers, 32), dtype=np.uint32)
    bits = tensor[lane + 32, column] >> rest.astype(np.uint32) & 1
    for b in range(registers * 32):
        expected[b // 32] |= bits[:, b] << np.uint32(b % 32)
    address = Address(32, 0)
    got = load(tensor, part, address)
    np.testing.assert_array_equal(got, expected)
    touched = np.zeros((128, 512), dtype=bool)
    touched[lane + 32, column] = True
    lanes, columns = cells(part, address)
    mine = np.zeros_like(touched)
    mine[lanes, columns] = True
    np.testing.assert_array_equal(mine, touched)
    target = rng.integers(0, 2**32, (128, 512), dtype=np.uint32)
    before = target.copy()
    store(target, part, address, got)
    np.testing.assert_array_equal(load(target, part, address), got)
    np.testing.assert_array_equal(target[~touched], before[~touched])
    if packed:
        assert not (target[touched] >> 16).any()


@given(split=st.integers(0, 100), count=st.sampled_from([1, 2, 8, 64]), packed=st.booleans())
def test_second_half_of_16x32bx2(split: int, count: int, packed: bool) -> None:
    """The second access begins at taddr + immHalfSplitoff (PTX ISA 9.7.16.8.3)."""
    part = fragment("16x32bx2", count, packed=packed, half_split=split)
    tensor = np.arange(128 * 512, dtype=np.uint32).reshape(128, 512)
    got = load(tensor, part, Address(16, 3))
    for thread in range(32):
        base = 3 + (split if thread >= 16 else 0)
        lane = 16 + thread % 16
        for register in range(count):
            if packed:
                low, high = tensor[lane, base + 2 * register : base + 2 * register + 2] & 0xFFFF
                assert got[register, thread] == low | high << 16
            else:
                assert got[register, thread] == tensor[lane, base + register]


@pytest.mark.parametrize(
    ("shape", "count", "split", "match"),
    [
        ("8x32b", 1, None, r"shape \.8x32b: accepted are 32x32b"),
        ("32x32b", 3, None, r"32x32b\.x3: accepted are powers of two up to x128"),
        ("32x32b", 256, None, r"up to x128"),
        ("16x128b", 128, None, r"16x128b\.x128: .* up to x64"),
        ("16x256b", 64, None, r"16x256b\.x64: .* up to x32"),
        ("16x32bx2", 1, None, "without immHalfSplitoff"),
        ("32x32b", 1, 4, "with immHalfSplitoff"),
    ],
)
def test_bad_fragments(shape: str, count: int, split: int | None, match: str) -> None:
    with pytest.raises(IllegalInstruction, match=match):
        fragment(shape, count, half_split=split)


def test_access() -> None:
    whole, half = fragment("32x32b", 32), fragment("16x64b", 4)
    for warp in range(12):
        check_access(whole, Address(warp % 4 * 32, 480), warp)
        check_access(half, Address(warp % 4 * 32 + 16, 504), warp)
    with pytest.raises(LaneReach, match="warp 5 at lane 0: it reaches lanes 32 to 63"):
        check_access(whole, Address(0, 0), 5)
    with pytest.raises(LaneReach, match="warp 3 at lane 128: it reaches lanes 96 to 127"):
        check_access(whole, Address(128, 0), 3)
    with pytest.raises(IllegalInstruction, match="at lane 16: accepted are multiples of 32"):
        check_access(whole, Address(16, 0), 0)
    with pytest.raises(IllegalInstruction, match="at lane 8: accepted are multiples of 16"):
        check_access(half, Address(8, 0), 0)
    with pytest.raises(OutOfBounds, match="takes columns 481 to 512"):
        check_access(whole, Address(0, 481), 0)
    with pytest.raises(OutOfBounds, match="takes columns 449 to 512"):
        check_access(fragment("32x32b", 32, packed=True), Address(0, 449), 0)


def test_reduction() -> None:
    values = np.array([[1.0, -5.0, np.nan], [2.0, 3.0, 1.0], [-0.5, 4.0, 2.0]], dtype=np.float32)
    words = values.view(np.uint32)

    def got(operation: str, **how: bool) -> list[float]:
        return reduce_columns(words, operation, "f32", **how).view(np.float32).tolist()

    assert got("max") == [2.0, 4.0, 2.0]
    assert got("min") == [-0.5, -5.0, 1.0]
    assert got("max", absolute=True) == [2.0, 5.0, 2.0]
    assert np.isnan(got("min", nan=True)).tolist() == [False, False, True]
    whole = np.array([[1, 2**31], [2**32 - 1, 5]], dtype=np.uint32)
    assert reduce_columns(whole, "max", "u32").tolist() == [2**32 - 1, 2**31]
    assert reduce_columns(whole, "max", "s32").tolist() == [1, 5]
    for arguments, match in (
        (("add", "f32"), "accepted are min and max"),
        (("min", "f16"), "accepted are min and max of f32, u32 and s32"),
    ):
        with pytest.raises(IllegalInstruction, match=match):
            reduce_columns(words, *arguments)
    with pytest.raises(IllegalInstruction, match="only f32 takes them"):
        reduce_columns(words, "min", "u32", nan=True)
    with pytest.raises(IllegalInstruction, match="at least x2"):
        reduce_columns(words[:1], "min", "f32")


@pytest.mark.parametrize("lane", [0, 32, 64, 96])
def test_shift(lane: int) -> None:
    before = np.arange(128 * 512, dtype=np.uint32).reshape(128, 512)
    tensor = before.copy()
    shift_down(tensor, Address(lane, 40))
    for row in range(128):
        moved = lane <= row < lane + 31
        np.testing.assert_array_equal(tensor[row, 40:48], before[row + moved, 40:48])
    np.testing.assert_array_equal(tensor[:, :40], before[:, :40])
    np.testing.assert_array_equal(tensor[:, 48:], before[:, 48:])


def test_bad_shifts() -> None:
    tensor = np.zeros((128, 512), dtype=np.uint32)
    with pytest.raises(IllegalInstruction, match="at lane 16: accepted are 0, 32, 64 and 96"):
        shift_down(tensor, Address(16, 0))
    with pytest.raises(IllegalInstruction, match="at lane 128"):
        shift_down(tensor, Address(128, 0))
    with pytest.raises(OutOfBounds, match="takes columns 505 to 512"):
        shift_down(tensor, Address(0, 505))
