import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.emulator.findings import IllegalInstruction, UnknownInstruction
from tests.emulator.tcgen05.descriptors import SharedDescriptor, Swizzle, decode_shared_descriptor
from tests.emulator.tcgen05.formats import Element
from tests.emulator.tcgen05.operands import (
    OperandShape,
    byte_addresses,
    chunk_index,
    gather,
    read_operand,
)
from tests.test_emulator import tcgen05_oracle as oracle

SHARED = 128 * 1024
# name, k of one instruction, padded
FORMS = [
    ("f16", 16, False),
    ("bf16", 16, False),
    ("tf32", 8, False),
    ("u8", 32, False),
    ("s8", 32, False),
    ("e4m3", 32, True),
    ("e5m2", 32, True),
    ("e2m3", 32, True),
    ("e3m2", 32, True),
    ("e2m1", 32, True),
    ("e2m1", 64, False),
]
ELEMENTS = {element.ptx_name: element for element in Element}


@st.composite
def placements(draw: st.DrawFn) -> tuple[oracle.Placement, OperandShape]:
    """A legal operand whose elements do not overlap."""
    name, k, padded = draw(st.sampled_from(FORMS))
    packed = name == "e2m1" and not padded
    mn_major = not packed and draw(st.booleans())
    modes = [0, 2, 4, 6] if not (mn_major and name == "tf32") else [1]
    mode = draw(st.sampled_from(modes))
    rows = 8 * draw(st.integers(1, 32))
    slot = 8 if padded else oracle.BITS[name]
    per_chunk = 128 // slot
    if mn_major:
        rows = -(-rows // per_chunk) * per_chunk
    row_bytes = 16 * oracle.SWIZZLES[mode][0]
    pad = 16 * draw(st.integers(0, 3))
    if mn_major:
        span = row_bytes * 8 // slot
        atom = 4 if mode == 1 else 8
        groups, steps = -(-rows // span), -(-k // atom)
        inner = atom * row_bytes + pad
        along_first = draw(st.booleans())
        group, step = (inner, inner * groups) if along_first else (inner * steps, inner)
        leading, stride = (step, group) if mode == 0 else (group, step)
    else:
        groups = rows // 8
        inner = 8 * row_bytes + pad
        if mode == 0:
            along_first = draw(st.booleans())
            leading, stride = (inner * groups, inner) if along_first else (inner, 2 * inner)
        else:
            leading, stride = 16, inner
    start = 16 * draw(st.integers(0, 512))
    placement = oracle.Placement(start, leading, stride, mode, name, mn_major, padded)
    return placement, OperandShape(rows, k, ELEMENTS[name], mn_major, padded)


@given(case=placements(), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=500, deadline=None)
def test_reads_what_the_canonical_layout_says(
    case: tuple[oracle.Placement, OperandShape], seed: int
) -> None:
    placement, shape = case
    rng = np.random.default_rng(seed)
    codes = oracle.random_codes(rng, shape.rows, shape.k, placement.name, special=seed % 2 == 0)
    shared = rng.integers(0, 256, SHARED, dtype=np.uint8)
    placement.put(shared, codes)
    descriptor = decode_shared_descriptor(placement.word)
    with np.errstate(invalid="ignore"):
        got = read_operand(shared, descriptor, shape).astype(np.float64)
    np.testing.assert_array_equal(got, oracle.values(codes, placement.name))


@given(case=placements())
@settings(max_examples=60, deadline=None)
def test_addresses_are_the_bytes_that_hold_elements(
    case: tuple[oracle.Placement, OperandShape],
) -> None:
    placement, shape = case
    row, k = np.meshgrid(np.arange(shape.rows), np.arange(shape.k), indexing="ij")
    bits = placement.bit_address(row, k)
    last = bits + oracle.BITS[placement.name] - 1
    expected = np.union1d(bits // 8, last // 8)
    if oracle.BITS[placement.name] == 16 or oracle.BITS[placement.name] == 32:
        bytes_each = oracle.BITS[placement.name] // 8
        expected = np.unique((bits // 8)[..., None] + np.arange(bytes_each))
    descriptor = decode_shared_descriptor(placement.word)
    np.testing.assert_array_equal(np.unique(byte_addresses(descriptor, shape)), expected)


def test_swizzle_permutes_absolute_address_bits() -> None:
    # 32 bytes of K at byte 32 of a 128B-swizzled row: row r holds them in units 2 ^ r, 3 ^ r.
    shape = OperandShape(8, 32, Element.U8)
    for start in (1024 + 32, 4096 + 32):
        addresses = byte_addresses(SharedDescriptor(start, 16, 1024, Swizzle.B128), shape)
        for row in range(8):
            base = start - 32 + 128 * row
            assert addresses[row, 0] == base + 16 * (2 ^ row)
            assert addresses[row, 16] == base + 16 * (3 ^ row)


def test_index_is_shared_between_starts_of_one_phase() -> None:
    shape = OperandShape(128, 32, Element.U8)
    first = chunk_index(SharedDescriptor(1056, 16, 1024, Swizzle.B128), shape)
    second = chunk_index(SharedDescriptor(5152, 16, 1024, Swizzle.B128), shape)
    assert first[1] is second[1]
    assert (first[0], second[0]) == (1024, 5120)
    assert not first[1].flags.writeable


def test_first_row() -> None:
    shared = np.arange(65536, dtype=np.uint32).view(np.uint8)
    descriptor = SharedDescriptor(256, 16, 512, Swizzle.B64)
    whole = gather(shared, descriptor, OperandShape(40, 32, Element.U8))
    part = gather(shared, descriptor, OperandShape(24, 32, Element.U8, first_row=16))
    np.testing.assert_array_equal(whole[16:], part)


@pytest.mark.parametrize("swizzle", [Swizzle.NONE, Swizzle.B32, Swizzle.B64, Swizzle.B128])
def test_mn_major_tf32_needs_32_byte_atoms(swizzle: Swizzle) -> None:
    with pytest.raises(IllegalInstruction, match=r"tf32 .* only 1 \(128B, 32B atoms\) is accepted"):
        chunk_index(SharedDescriptor(0, 16, 16, swizzle), OperandShape(64, 8, Element.TF32, True))


@pytest.mark.parametrize("element", [Element.F16, Element.E4M3, Element.U8])
def test_32_byte_atoms_are_for_mn_major_tf32(element: Element) -> None:
    descriptor = SharedDescriptor(0, 16, 16, Swizzle.B128_ATOM32)
    with pytest.raises(IllegalInstruction, match=r"all but 1 \(128B, 32B atoms\) are accepted"):
        chunk_index(descriptor, OperandShape(64, 16, element, True))
    with pytest.raises(UnknownInstruction, match="K-major matrix with 128B swizzle of 32B atoms"):
        chunk_index(descriptor, OperandShape(64, 16, element))


def test_mn_major_rows_come_in_16_bytes() -> None:
    descriptor = SharedDescriptor(0, 16, 16, Swizzle.B128)
    with pytest.raises(IllegalInstruction, match=r"24 rows from row 0: e4m3 needs multiples of 16"):
        chunk_index(descriptor, OperandShape(24, 32, Element.E4M3, True))
    with pytest.raises(IllegalInstruction, match=r"32 rows from row 8: e4m3 needs multiples of 16"):
        chunk_index(descriptor, OperandShape(32, 32, Element.E4M3, True, first_row=8))


def test_end_of_shared_memory() -> None:
    shared = np.zeros(4096, dtype=np.uint8)
    with pytest.raises(IndexError, match="out of bounds"):
        gather(
            shared, SharedDescriptor(1024, 16, 1024, Swizzle.B128), OperandShape(32, 32, Element.U8)
        )
