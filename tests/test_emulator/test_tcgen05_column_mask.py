import pytest

from tests.emulator.findings import IllegalInstruction, UnknownInstruction
from tests.emulator.tcgen05.column_mask import decode_column_mask


def descriptor(
    starts: tuple[int, ...],
    firsts: tuple[int, ...],
    skip: int,
    use: int,
    shift: int = 0,
    mask: int = 1,
) -> int:
    word = mask << 39 | skip << 40 | use << 48 | shift << 56
    for i, (start, first) in enumerate(zip(starts, firsts, strict=True)):
        word |= start << 8 * i | first << (32 + i)
    return word


def bits(mask: str, size: int) -> list[bool]:
    """Mask as the PTX ISA prints it, least significant bit last, repeated to ``size`` bits."""
    lsb_first = [c == "1" for c in reversed(mask.replace(" ", ""))]
    period = 7
    while len(lsb_first) < size:
        lsb_first.append(lsb_first[len(lsb_first) - period])
    return lsb_first[:size]


def test_ptx_example_1_no_mask() -> None:
    mask = decode_column_mask(descriptor((0,) * 4, (0,) * 4, 4, 3, mask=0), 128, 64, 0)
    assert mask.zero is None
    assert mask.shift == 0


def test_ptx_example_2() -> None:
    mask = decode_column_mask(descriptor((0,), (0,), 2, 3), 128, 128, 0)
    assert mask.zero is not None
    assert mask.zero.tolist() == bits("111 0000 111 0000", 128)


def test_ptx_example_3() -> None:
    mask = decode_column_mask(descriptor((0, 0), (1, 0), 2, 3), 64, 128, 0)
    assert mask.zero is not None
    assert mask.zero.tolist() == bits("111 0000 111 0000 111", 64) + bits(
        "0000 111 0000 111 0000", 64
    )


def test_ptx_example_4() -> None:
    mask = decode_column_mask(descriptor((0, 1, 2, 1), (1, 1, 0, 0), 2, 3, shift=2), 32, 128, 8)
    assert mask.zero is not None
    expected = (
        bits("0000 111 0000 111", 32)
        + bits("0000 111 0000 11", 32)
        + bits("111 0000 111 00", 32)
        + bits("111 0000 111 000", 32)
    )
    assert mask.zero.tolist() == expected
    assert mask.shift == 2


@pytest.mark.parametrize(
    ("word", "m", "max_shift", "error", "match"),
    [
        (1 << 36, 128, 0, IllegalInstruction, "reserved bits 36-38"),
        (1 << 63, 128, 0, IllegalInstruction, "reserved bits 36-38 and 62-63"),
        (9 << 56, 128, 8, IllegalInstruction, "column shift 9, at most 8"),
        (17 << 56, 32, 32, IllegalInstruction, "column shift 17, at most 16 with M = 32"),
        (33 << 56, 64, 32, IllegalInstruction, "column shift 33, at most 32"),
        (descriptor((4,), (0,), 2, 3), 128, 0, UnknownInstruction, "start count 4 of sub-mask 0"),
        (
            descriptor((0, 3), (1, 1), 2, 3),
            64,
            0,
            UnknownInstruction,
            "start count 3 of sub-mask 1",
        ),
    ],
)
def test_bad_masks(word: int, m: int, max_shift: int, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        decode_column_mask(word, m, 128, max_shift)
