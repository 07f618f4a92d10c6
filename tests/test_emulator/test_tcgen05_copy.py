import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.emulator.findings import IllegalInstruction, OutOfBounds
from tests.emulator.tcgen05.copy import (
    Copy,
    destination_lanes,
    source_addresses,
    source_words,
    write_words,
)
from tests.emulator.tcgen05.descriptors import decode_shared_descriptor
from tests.emulator.tcgen05.tensor_memory_layout import Address
from tests.test_emulator import tcgen05_oracle as oracle

FORMS = [
    ("128x256b", None),
    ("128x128b", None),
    ("4x256b", None),
    ("64x128b", "warpx2::02_13"),
    ("64x128b", "warpx2::01_23"),
    ("32x128b", "warpx4"),
]


def source_row(shape: str, multicast: str | None, lane: int) -> int | None:
    """Row that a lane receives, or None (warp pairs: PTX ISA 9.7.16.9.2)."""
    warp, within = divmod(lane, 32)
    match shape, multicast:
        case "4x256b", _:
            return warp if within == 0 else None
        case _, "warpx4":
            return within
        case _, "warpx2::02_13":
            return within + 32 * (warp % 2)
        case _, "warpx2::01_23":
            return within + 32 * (warp // 2)
    return lane


@given(
    form=st.sampled_from(FORMS),
    source=st.sampled_from([None, "b6x16_p32", "b4x16_p64"]),
    mode=st.sampled_from([0, 2, 4, 6]),
    start=st.integers(0, 100),
    column=st.integers(0, 504),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=300, deadline=None)
def test_copies_what_the_layouts_say(
    form: tuple[str, str | None], source: str | None, mode: int, start: int, column: int, seed: int
) -> None:
    shape, multicast = form
    copy = Copy(shape, multicast, source)
    rows, bits = (int(x) for x in shape[:-1].split("x"))
    k = bits // 8
    name = {None: "u8", "b6x16_p32": "e3m2", "b4x16_p64": "e2m1"}[source]
    row_bytes = 16 * oracle.SWIZZLES[mode][0]
    leading = 16 * rows if mode == 0 else 16
    placement = oracle.Placement(
        16 * start, leading, 8 * row_bytes, mode, name, False, bool(source)
    )
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 1 << oracle.BITS[name], (rows, k))
    shared = rng.integers(0, 256, 32768, dtype=np.uint8)
    placement.put(shared, codes)
    descriptor = decode_shared_descriptor(placement.word)
    tensor = rng.integers(0, 2**32, (128, 512), dtype=np.uint32)
    expected = tensor.copy()
    shift = {None: 0, "b6x16_p32": 1, "b4x16_p64": 2}[source]
    for lane in range(128):
        row = source_row(shape, multicast, lane)
        if row is not None:
            line = (codes[row] << shift).astype(np.uint8).view(np.uint32)
            expected[lane, column : column + k // 4] = line
    # The padding is neither read nor copied.
    noise = rng.integers(0, 256, 32768, dtype=np.uint8)
    addresses = source_addresses(copy, descriptor)
    noise[addresses] = shared[addresses]
    words = source_words(noise, copy, descriptor)
    write_words(tensor, copy, Address(0, column), words)
    np.testing.assert_array_equal(tensor, expected)


def test_4x256b_takes_one_lane_of_every_subpartition() -> None:
    tensor = np.zeros((128, 512), dtype=np.uint32)
    words = np.arange(1, 33, dtype=np.uint32).reshape(4, 8)
    write_words(tensor, Copy("4x256b"), Address(31, 8), words)
    for i in range(4):
        np.testing.assert_array_equal(tensor[31 + 32 * i, 8:16], words[i])
    assert np.count_nonzero(tensor) == 32


@pytest.mark.parametrize(
    ("shape", "multicast", "source", "match"),
    [
        ("32x256b", None, None, r"shape \.32x256b: accepted are 128x256b"),
        ("128x256b", "warpx4", None, r"\.128x256b with \.warpx4: accepted is no multicast"),
        (
            "64x128b",
            None,
            None,
            r"with no multicast: accepted is \.warpx2::02_13 or \.warpx2::01_23",
        ),
        ("64x128b", "warpx4", None, r"accepted is \.warpx2"),
        ("32x128b", "warpx2::01_23", None, r"accepted is \.warpx4"),
        ("128x128b", None, "b8x16", r"source format \.b8x16: accepted are"),
    ],
)
def test_bad_copies(shape: str, multicast: str | None, source: str | None, match: str) -> None:
    with pytest.raises(IllegalInstruction, match=match):
        Copy(shape, multicast, source)


def test_bad_destinations() -> None:
    tensor = np.zeros((128, 512), dtype=np.uint32)
    with pytest.raises(OutOfBounds, match=r"\.128x256b takes columns 505 to 512"):
        write_words(tensor, Copy("128x256b"), Address(0, 505), np.zeros((128, 8), np.uint32))
    with pytest.raises(IllegalInstruction, match=r"\.32x128b at lane 32: it writes all 128 lanes"):
        destination_lanes(Copy("32x128b", "warpx4"), 32)
    with pytest.raises(IllegalInstruction, match=r"\.4x256b at lane 32: accepted are 0 to 31"):
        destination_lanes(Copy("4x256b"), 32)
