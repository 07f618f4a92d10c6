"""Tile copies, against element-wise loops from the PTX ISA; swizzles, against its tables."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.emulator.findings import IllegalInstruction, Misaligned, UnknownInstruction
from tests.emulator.tma.box import box_of, place
from tests.emulator.tma.element_type import ElementType
from tests.emulator.tma.replace import replace_field
from tests.emulator.tma.swizzle import Swizzle, placement
from tests.emulator.tma.tensor_map import Interleave, TensorMap, decode, encode
from tests.emulator.tma.tile import Direction, locate, locate_rows

BASE = 0x1_0000_0000
RNG = np.random.default_rng(0)


class Global:
    def __init__(self, nbytes: int = 1 << 16) -> None:
        self.data = RNG.integers(0, 256, nbytes, dtype=np.uint8)
        self.touched = np.zeros(nbytes, bool)

    def fetch(self, address, nbytes):
        start = address - BASE
        assert 0 <= start <= start + nbytes <= self.data.size
        return self.data[start : start + nbytes]


def sample(kind=ElementType.U16, dims=(64, 16), strides=(256,), box=(16, 4), **fields):
    fields.setdefault("element_strides", (1,) * len(dims))
    return TensorMap(kind, BASE, dims, strides, box, **fields)


@st.composite
def tiles(draw, kinds=(ElementType.U8, ElementType.U16, ElementType.F32, ElementType.U64)):
    """Tensor map of any rank, with coordinates in and around its tensor."""
    kind = draw(st.sampled_from(kinds))
    rank = draw(st.integers(1, 5))
    whole = 128 // kind.bits
    largest = 16 if rank < 4 else 4
    dims = [draw(st.integers(1, 3 * whole))]
    dims += [draw(st.integers(1, largest if d < 3 else 3)) for d in range(1, rank)]
    strides, reach = [], dims[0] * kind.bits // 8
    for extent in dims[1:]:
        strides.append((reach + 15) // 16 * 16 + 16 * draw(st.integers(0, 1)))
        reach = strides[-1] * extent
    swizzle = draw(st.sampled_from([s for s in Swizzle if s != Swizzle.B128_ATOM_32B_FLIP_8B]))
    most = swizzle.span // 16 if swizzle else 2
    box = [draw(st.integers(1, most)) * whole]
    box += [draw(st.integers(1, 9 if d < 2 else 3)) for d in range(1, rank)]
    steps = [draw(st.integers(1, 3)) for _ in range(rank)]
    coordinates = [draw(st.integers(-2, 4)) * whole]
    coordinates += [draw(st.integers(-4, extent)) for extent in dims[1:]]
    tensor_map = TensorMap(
        kind,
        BASE,
        tuple(dims),
        tuple(strides),
        tuple(box),
        tuple(steps),
        swizzle=swizzle,
        nan_fill=kind.floating and draw(st.booleans()),
    )
    return tensor_map, tuple(coordinates)


def elements(tensor_map, coordinates):
    """List (index in the box, byte offset in global memory or None) of every element, in order."""
    steps = (1, *tensor_map.element_strides[1:])
    spans = [range(0, b, s) for b, s in zip(tensor_map.box, steps, strict=True)]
    nbytes = tensor_map.element_type.bits // 8
    for number, offset in enumerate(itertools.product(*spans[::-1])):
        at = [c + o for c, o in zip(coordinates, offset[::-1], strict=True)]
        inside = all(0 <= a < d for a, d in zip(at, tensor_map.dims, strict=True))
        where = at[0] * nbytes + sum(a * s for a, s in zip(at[1:], tensor_map.strides, strict=True))
        yield number, where if inside else None


def xor_swizzle(swizzle, address):
    """Swizzled address by the tables of PTX ISA 5.5.7, read as rows of eight 16-byte cells."""
    row, cell, byte = address // 128, address // 16 % 8, address % 16
    atom, rows = {
        Swizzle.NONE: (1, 1),
        Swizzle.B32: (1, 2),
        Swizzle.B64: (1, 4),
        Swizzle.B128: (1, 8),
        Swizzle.B128_ATOM_32B: (2, 4),
        Swizzle.B128_ATOM_32B_FLIP_8B: (2, 4),
        Swizzle.B128_ATOM_64B: (4, 2),
    }[swizzle]
    cell ^= row % rows * atom
    if swizzle == Swizzle.B128_ATOM_32B_FLIP_8B and row % 2:
        byte ^= 8
    return row * 128 + cell * 16 + byte


@given(tiles(), st.integers(0, 7))
@settings(max_examples=300, deadline=None)
def test_load_matches_loop(drawn, line):
    tensor_map, coordinates = drawn
    assert decode(encode(tensor_map)) == tensor_map
    memory, shared = Global(), np.full(1 << 16, 0xCD, np.uint8)
    address = 1024 + 128 * line
    nbytes = tensor_map.element_type.bits // 8
    filler = bytes([0xF7, 0x7F]) * 4 if tensor_map.nan_fill else bytes(8)
    expected, used = shared.copy(), np.zeros(shared.size, bool)
    row_elements = tensor_map.box[0]
    pitch = tensor_map.swizzle.span or row_elements * nbytes
    count = 0
    for number, where in elements(tensor_map, coordinates):
        row, column = divmod(number, row_elements)
        value = filler[:nbytes] if where is None else memory.data[where : where + nbytes].tobytes()
        for byte in range(nbytes):
            at = xor_swizzle(tensor_map.swizzle, address + row * pitch + column * nbytes + byte)
            expected[at] = value[byte]
            used[at] = True
        count += nbytes
    tile = locate(tensor_map, coordinates)
    where = place(tensor_map, tile.box, address)
    where.scatter(tile.read(memory.fetch), shared[address : address + where.nbytes])
    np.testing.assert_array_equal(shared, expected)
    assert tile.box.transaction_bytes == count
    assert where.nbytes == np.flatnonzero(used)[-1] + 1 - address


@given(tiles(), st.integers(0, 7))
@settings(max_examples=200, deadline=None)
def test_store_matches_loop(drawn, line):
    tensor_map, coordinates = drawn
    coordinates = tuple(max(c, 0) for c in coordinates)
    # Rows must end at a multiple of 16 bytes; otherwise the tensor would be written past its end.
    whole = 128 // tensor_map.element_type.bits
    dims = (-(-tensor_map.dims[0] // whole) * whole, *tensor_map.dims[1:])
    padded = TensorMap(**{**tensor_map.__dict__, "dims": dims})
    memory, shared = Global(), RNG.integers(0, 256, 1 << 16, dtype=np.uint8)
    address = 1024 + 128 * line
    nbytes = tensor_map.element_type.bits // 8
    expected, touched = memory.data.copy(), np.zeros(memory.data.size, bool)
    pitch = tensor_map.swizzle.span or tensor_map.box[0] * nbytes
    for number, where in elements(padded, coordinates):
        row, column = divmod(number, tensor_map.box[0])
        if where is not None:
            for byte in range(nbytes):
                source = address + row * pitch + column * nbytes + byte
                expected[where + byte] = shared[xor_swizzle(tensor_map.swizzle, source)]
                touched[where + byte] = True
    tile = locate(tensor_map, coordinates, Direction.STORE)
    placed = place(tensor_map, tile.box, address)
    tile.write(placed.gather(shared[address : address + placed.nbytes]), memory.fetch)
    np.testing.assert_array_equal(memory.data, expected)
    # Footprints are exact, for every granule of the shadow memory.
    for granule in (1, 4, 16):
        marks = np.zeros(memory.data.size // granule, np.int32)
        for footprint, _ in tile.parts:
            start = footprint.address - BASE
            assert start % 16 == 0
            end = -(-(start + footprint.nbytes) // granule)
            footprint.of(marks[start // granule : end], granule)[...] = 1
        np.testing.assert_array_equal(marks != 0, touched.reshape(-1, granule).any(1))


def test_footprint_is_exact_for_loads():
    tensor_map = sample(dims=(20, 16), box=(16, 3), element_strides=(1, 2))
    tile = locate(tensor_map, (8, -1))
    ((footprint, where),) = tile.parts
    assert footprint.address == BASE + 256 + 16
    assert (footprint.shape, footprint.strides) == ((1, 24), (512, 1))
    assert footprint.nbytes == 24
    assert where == (slice(1, 2), slice(0, 24))
    assert locate(tensor_map, (24, 0)).parts == ()


def test_granules_touched_in_part_count():
    ((footprint, _),) = locate(sample(dims=(9, 16), box=(16, 3)), (0, 0)).parts
    assert footprint.shape == (3, 18)
    marks = np.zeros(-(-footprint.nbytes // 4), np.int32)
    footprint.of(marks, 4)[...] = 1
    assert np.flatnonzero(marks).tolist() == [row * 64 + i for row in range(3) for i in range(5)]


def test_read_does_not_alias_global_memory():
    memory = Global()
    tensor_map = sample(dims=(64, 16), strides=(128,), box=(64, 4))
    box = locate(tensor_map, (0, 0)).read(memory.fetch)
    before = box.copy()
    memory.data[:] = 0
    np.testing.assert_array_equal(box, before)


@pytest.mark.parametrize("swizzle", list(Swizzle))
@pytest.mark.parametrize("phase", [0, 128, 384, 896])
def test_swizzle_tables(swizzle, phase):
    row_bytes = swizzle.span or 128
    where = placement(swizzle, 16, row_bytes, phase)
    source = RNG.integers(0, 256, 16 * row_bytes, dtype=np.uint8)
    window = np.zeros(where.nbytes, np.uint8)
    where.scatter(source, window)
    expected = np.zeros_like(window)
    for byte, value in enumerate(source):
        expected[xor_swizzle(swizzle, phase + byte) - phase] = value
    np.testing.assert_array_equal(window, expected)
    np.testing.assert_array_equal(where.gather(window), source)


def test_scatter_to_unaligned_host_memory():
    where = placement(Swizzle.B128, 8, 128, 0)
    source = RNG.integers(0, 256, 1024, dtype=np.uint8)
    aligned, buffer = np.zeros(1024, np.uint8), np.zeros(1040, np.uint8)
    odd = 1 + (-buffer.ctypes.data) % 16
    where.scatter(source, aligned)
    where.scatter(source, buffer[odd : odd + 1024])
    np.testing.assert_array_equal(aligned, buffer[odd : odd + 1024])


@pytest.mark.parametrize("swizzle", [Swizzle.NONE, Swizzle.B64, Swizzle.B128])
def test_gather4_and_scatter4(swizzle):
    tensor_map = sample(box=(32, 1), swizzle=swizzle)
    rows = (5, -1, 0, 15)
    memory = Global()
    tile = locate_rows(tensor_map, 48, rows)
    box = tile.read(memory.fetch).view(np.uint16).reshape(4, 32)
    assert tile.box.transaction_bytes == 4 * 64
    table = memory.data[: 16 * 256].view(np.uint16).reshape(16, 128)
    for number, row in enumerate(rows):
        expected = np.zeros(32, np.uint16)
        if row >= 0:
            expected[:16] = table[row, 48:64]
        np.testing.assert_array_equal(box[number], expected)
    where = place(tensor_map, tile.box, 2048)
    pitch = swizzle.span or 64
    assert 3 * pitch < where.nbytes <= 4 * pitch

    target = Global()
    before = target.data.copy()
    values = RNG.integers(0, 1 << 16, (4, 32), dtype=np.uint16)
    locate_rows(tensor_map, 32, (9, 3, 16, 4), Direction.STORE).write(
        values.view(np.uint8).reshape(-1), target.fetch
    )
    expected = before[: 16 * 256].view(np.uint16).reshape(16, 128).copy()
    for number, row in ((0, 9), (1, 3), (3, 4)):
        expected[row, 32:64] = values[number]
    np.testing.assert_array_equal(
        target.data[: 16 * 256].view(np.uint16).reshape(16, 128), expected
    )


def test_packed_fp4_moves_as_it_is():
    tensor_map = sample(ElementType.U4_ALIGN8B, (512, 16), (256,), (256, 8), swizzle=Swizzle.B128)
    memory = Global()
    tile = locate(tensor_map, (256, 3))
    box = tile.read(memory.fetch).reshape(8, 128)
    np.testing.assert_array_equal(box, memory.data[: 16 * 256].reshape(16, 256)[3:11, 128:])
    assert tile.box.transaction_bytes == 1024


@pytest.mark.parametrize(
    ("kind", "used"), [(ElementType.U4_ALIGN16B, 8), (ElementType.U6_ALIGN16B, 12)]
)
def test_padded_types_spread_sixteen_elements_over_sixteen_bytes(kind, used):
    stride = 256 * used // 16
    tensor_map = sample(kind, (256, 16), (stride,), (128, 4), swizzle=Swizzle.B128)
    memory = Global()
    tile = locate(tensor_map, (128, 14))
    box = tile.read(memory.fetch).reshape(4, 8, 16)
    rows = memory.data[: 16 * stride].reshape(16, 2, 8, used)[14:, 1]
    np.testing.assert_array_equal(box[:2, :, :used], rows)
    assert not box[:, :, used:].any()
    assert not box[2:].any()
    assert tile.box.row_bytes == 128
    assert tile.box.transaction_bytes == 4 * 8 * used


def test_fp6_stores_drop_the_padding_bits():
    tensor_map = sample(ElementType.U6_ALIGN16B, (128, 2), (96,), (128, 2))
    memory = Global()
    values = RNG.integers(0, 64, (2, 128), dtype=np.uint8)
    noise = RNG.integers(0, 4, (2, 128), dtype=np.uint8) << 6
    locate(tensor_map, (0, 0), Direction.STORE).write((values | noise).reshape(-1), memory.fetch)
    for row in range(2):
        packed = int.from_bytes(memory.data[96 * row : 96 * row + 96].tobytes(), "little")
        assert [packed >> 6 * i & 63 for i in range(128)] == values[row].tolist()


def test_reduction_in_bounds_only():
    tensor_map = sample(ElementType.U32, (16, 3), (64,), (16, 4))
    memory = Global()
    before = memory.data.view(np.uint32).copy()
    values = RNG.integers(0, 1 << 32, (4, 16), dtype=np.uint32)
    tile = locate(tensor_map, (8, 1), Direction.REDUCE)
    tile.reduce("add", values.view(np.uint8).reshape(-1), memory.fetch)
    expected = before.copy()
    expected[:48].reshape(3, 16)[1:3, 8:] += values[:2, :8]
    np.testing.assert_array_equal(memory.data.view(np.uint32), expected)


FLIP = Swizzle.B128_ATOM_32B_FLIP_8B
U4, U6 = ElementType.U4_ALIGN16B, ElementType.U6_ALIGN16B
FP4 = {"dims": (256, 4), "strides": (128,), "box": (128, 4)}
FP6 = {"dims": (256, 4), "strides": (192,), "box": (128, 4)}


@pytest.mark.parametrize(
    ("tensor_map", "coordinates", "direction", "message"),
    [
        (sample(), (4, 0), Direction.LOAD, "first coordinate 4 of U16, accepted multiples of 8"),
        (sample(), (-4, 0), Direction.PREFETCH, "accepted multiples of 8"),
        (sample(), (0, -1), Direction.STORE, "are not negative"),
        (sample(), (0, -1), Direction.REDUCE, "are not negative"),
        (sample(), (0, 0, 0), Direction.LOAD, "3 coordinates for a tensor map of rank 2"),
        (sample(swizzle=FLIP), (0, 0), Direction.STORE, "FLIP_8B, load only"),
        (sample(U4, **FP4), (0, 0), Direction.STORE, "store of U4_ALIGN16B, load only"),
        (sample(U4, **FP4), (32, 0), Direction.LOAD, "accepted multiples of 128"),
        (sample(U6, **FP6), (0, 0), Direction.REDUCE, "reduce of U6_ALIGN16B, load only"),
        (
            sample(U6, **FP6, swizzle=Swizzle.B128_ATOM_64B),
            (0, 0),
            Direction.LOAD,
            "B128_ATOM_64B, store only",
        ),
    ],
)
def test_illegal_copies(tensor_map, coordinates, direction, message):
    with pytest.raises(IllegalInstruction, match=message):
        locate(tensor_map, coordinates, direction)


def test_illegal_gathers():
    with pytest.raises(IllegalInstruction, match="boxes of one row"):
        locate_rows(sample(), 0, (0, 1, 2, 3))
    with pytest.raises(IllegalInstruction, match="gather4 or scatter4 of 3 rows"):
        locate_rows(sample(box=(16, 1)), 0, (0, 1, 2))
    with pytest.raises(IllegalInstruction, match="are not negative"):
        locate_rows(sample(box=(16, 1)), 0, (0, 1, -2, 3), Direction.STORE)


def test_interleave_is_refused_by_name():
    tensor_map = sample(dims=(8, 4, 4), strides=(64, 256), box=(8, 2, 2), interleave=Interleave.B16)
    with pytest.raises(UnknownInstruction, match="B16 interleave"):
        locate(tensor_map, (0, 0, 0))


def test_shared_alignment():
    tensor_map = sample()
    with pytest.raises(Misaligned, match=r"0x440, accepted multiples of 128"):
        place(tensor_map, box_of(tensor_map), 1024 + 64)


DESCRIPTOR = encode(sample(swizzle=Swizzle.B64))


def flipped(*bits: int) -> bytes:
    value = int.from_bytes(DESCRIPTOR, "little")
    for bit in bits:
        value ^= 1 << bit
    return value.to_bytes(128, "little")


def test_decode_ignores_what_encoders_differ_in():
    assert decode(flipped(64 + 1, 64 + 21, 600, 1000)) == sample(swizzle=Swizzle.B64)
    assert decode(flipped(64 + 1)) is decode(flipped(64 + 1))


@pytest.mark.parametrize(
    ("descriptor", "message"),
    [
        (DESCRIPTOR[:64], "tensor map of 64 bytes, accepted 128"),
        (flipped(64 + 0), "reserved bits are set"),
        (flipped(64 + 30), "reserved bits are set"),
        (flipped(511), "reserved bits are set"),
        (flipped(64 + 6, 64 + 5), "with rank 8"),
        (flipped(64 + 10, 64 + 9, 64 + 8), "element type 15"),
        (flipped(64 + 16), "element type 1 "),
        (flipped(64 + 11, 64 + 12), "interleave 3"),
        (flipped(64 + 19), "swizzle mode 2 and atomicity 1"),
        (flipped(0), "address 0x100000001, accepted multiples of 16"),
        (flipped(64 + 15), "NaN fill of U16"),
        (flipped(440), "box rows of 30 bytes, accepted multiples of 16"),
        (b"\0" * 128, "box rows of 1 bytes"),
    ],
)
def test_decode_refuses(descriptor, message):
    with pytest.raises(IllegalInstruction, match=message):
        decode(descriptor)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dims": (64,) * 6, "strides": (128,) * 5, "box": (8,) * 6}, "rank 6"),
        ({"dims": (), "strides": (), "box": ()}, "rank 0"),
        ({"strides": (256, 256)}, "the tensor has 2"),
        ({"kind": U4, "dims": (64, 16), "box": (128, 4)}, "first dimension 64 of U4_ALIGN16B"),
        ({"kind": U4, "dims": (128, 16), "box": (64, 4)}, "the first accepted is 128"),
        ({"kind": U4, **FP4, "strides": (144,)}, "strides .* multiples of 32"),
        ({"kind": U4, **FP4, "swizzle": Swizzle.B64}, "box rows of 128 bytes, accepted up to 64"),
        ({"kind": U4, **FP4, "swizzle": FLIP}, "FLIP_8B of U4_ALIGN16B"),
        ({"kind": ElementType.U4_ALIGN8B, "dims": (63, 4), "box": (32, 4)}, "multiples of 2"),
        ({"kind": ElementType.U64, "box": (256, 256)}, "accepted up to 232448"),
        ({"kind": U6, **FP6, "nan_fill": True}, "NaN fill of U6_ALIGN16B"),
    ],
)
def test_encode_refuses(fields, message):
    with pytest.raises(IllegalInstruction, match=message):
        encode(sample(**fields))


def test_replaced_fields_decode():
    """A tensor map built only by tensormap.replace, with PTX's field numbers, decodes."""
    descriptor = bytes(128)
    for field, value, ordinal in (
        ("global_address", BASE, None),
        ("rank", 2, None),
        ("elemtype", 8, None),
        ("swizzle_mode", 3, None),
        ("swizzle_atomicity", 2, None),
        ("fill_mode", 1, None),
        ("interleave_layout", 0, None),
        *(("global_dim", extent, i) for i, extent in enumerate((100, 20, 3))),
        *(("global_stride", stride, i) for i, stride in enumerate((512, 1 << 37))),
        *(("box_dim", extent, i) for i, extent in enumerate((32, 256, 1))),
        *(("element_stride", stride, i) for i, stride in enumerate((1, 8, 2))),
    ):
        descriptor = replace_field(descriptor, field, value, ordinal)
    assert decode(descriptor) == TensorMap(
        ElementType.F32_FTZ,
        BASE,
        (100, 20, 3),
        (512, 1 << 37),
        (32, 256, 1),
        (1, 8, 2),
        swizzle=FLIP,
        nan_fill=True,
    )


@pytest.mark.parametrize("kind", list(ElementType))
def test_replaced_element_types(kind):
    shape = ((256, 4), (4096,), (128, 4))
    whole, other = sample(kind, *shape), encode(sample(ElementType.TF32, *shape))
    numbers = [
        n for n in range(16) if replace_field(other, "elemtype", n)[:64] == encode(whole)[:64]
    ]
    # PTX ISA 9.7.9.28, table of new_val.
    names = "U8 U16 U32 S32 U64 S64 F16 F32 F32_FTZ F64 BF16 TF32 TF32_FTZ U4_ALIGN8B U4_ALIGN16B"
    assert numbers == [[*names.split(), "U6_ALIGN16B"].index(kind.name)]


@pytest.mark.parametrize(
    ("field", "value", "ordinal", "message"),
    [
        ("colour", 0, None, r"tensormap.replace .colour"),
        ("rank", 5, None, r"\.rank with 5, accepted 0 to 4"),
        ("rank", 1, 0, r"\.rank with ord 0, accepted none"),
        ("box_dim", 16, None, r"\.box_dim with ord None, accepted 0 to 4"),
        ("box_dim", 257, 0, "accepted 1 to 256"),
        ("global_stride", 16, 4, "with ord 4, accepted 0 to 3"),
        ("global_stride", 24, 0, "multiples of 16"),
        ("element_stride", 0, 1, "accepted 1 to 8"),
        ("swizzle_mode", 4, None, "accepted 0 to 3"),
        ("elemtype", 16, None, "accepted 0 to 15"),
    ],
)
def test_replace_refuses(field, value, ordinal, message):
    with pytest.raises(IllegalInstruction, match=message):
        replace_field(DESCRIPTOR, field, value, ordinal)


def test_replace_refuses_a_short_descriptor():
    with pytest.raises(IllegalInstruction, match="of 64 bytes, accepted 128"):
        replace_field(bytes(64), "rank", 0)
