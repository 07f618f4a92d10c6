"""Fragments and descriptors of wgmma, element by element, from the PTX ISA."""

import numpy as np
import pytest

from tests.emulator.findings import IllegalInstruction, Misaligned
from tests.emulator.tcgen05.descriptors import Swizzle
from tests.emulator.tcgen05.formats import Element
from tests.emulator.wgmma.descriptor import decode_descriptor
from tests.emulator.wgmma.fragments import a_matrix, d_matrix, d_registers


def test_a() -> None:
    """Fragment A agrees with the PTX ISA, "Matrix fragments for wgmma.mma_async.m64nNk16"."""
    elements = np.arange(4 * 4 * 32 * 2, dtype=np.float32) % 1024
    registers = elements.astype(np.float16).view(np.uint32).reshape(4, 4, 32)
    matrix = a_matrix(registers, Element.F16)
    for thread in range(128):
        for i in range(8):
            row = 16 * (thread // 32) + thread % 32 // 4 + (8 if i // 2 in (1, 3) else 0)
            column = thread % 4 * 2 + (i & 1) + (8 if i >= 4 else 0)
            word = registers[thread // 32, i // 2, thread % 32]
            assert matrix[row, column] == np.array([word]).view(np.float16)[i & 1]


@pytest.mark.parametrize("n", [8, 24, 256])
def test_d(n: int) -> None:
    """Fragment D agrees with the same section of the PTX ISA, from and to registers."""
    registers = np.arange(4 * (n // 2) * 32, dtype=np.float32).reshape(4, n // 2, 32)
    matrix = d_matrix(registers)
    for thread in range(128):
        for i in range(n // 2):
            row = 16 * (thread // 32) + thread % 32 // 4 + (8 if i % 4 >= 2 else 0)
            column = i // 4 * 8 + thread % 4 * 2 + (i & 1)
            assert matrix[row, column] == registers[thread // 32, i, thread % 32]
    for warp in range(4):
        np.testing.assert_array_equal(d_registers(matrix, warp), registers[warp])


@pytest.mark.parametrize(
    ("mode", "swizzle"), list(enumerate([Swizzle.NONE, Swizzle.B128, Swizzle.B64, Swizzle.B32]))
)
def test_the_fields_of_a_descriptor(mode: int, swizzle: Swizzle) -> None:
    found = decode_descriptor(mode << 62 | 0x123 << 32 | 0x45 << 16 | 0x3C0)
    assert (found.start, found.leading, found.stride) == (0x3C00, 0x450, 0x1230)
    assert found.swizzle is swizzle


@pytest.mark.parametrize("bit", [14, 15, 30, 31, 46, 48, 52, 61])
def test_bits_without_a_meaning(bit: int) -> None:
    with pytest.raises(IllegalInstruction, match=f"has bits {1 << bit:#x} set"):
        decode_descriptor(1 << bit)


@pytest.mark.parametrize(("mode", "row"), [(1, 128), (2, 64), (3, 32)])
def test_where_a_swizzled_matrix_may_start(mode: int, row: int) -> None:
    for start in range(0, row, 16):
        assert decode_descriptor(mode << 62 | (8 * row + start) >> 4).start == 8 * row + start
    for start in range(row, 8 * row, 16):
        with pytest.raises(Misaligned, match=f"starts at a multiple of {8 * row}"):
            decode_descriptor(mode << 62 | start >> 4)
