"""Layout of threads over rows: pure functions of the shape."""

from itertools import product

import pytest

from nvfp4_kernels import InvalidArgument
from nvfp4_kernels.device.rowwise.tile import RowTile, choose_row_parts, choose_whole_rows
from nvfp4_kernels.sm100.limits import SMS

ROWS = (1, 17, 1024, 100_000)
WIDTHS = (16, 80, 4096, 7168, 24576)


def check_legal(tile: RowTile) -> None:
    assert tile.slots in (1, 2, 4, 8)
    assert tile.threads <= 512
    # Steps and CTAs along a row must begin at an atom of scales.
    assert tile.stride % 4 == 0


@pytest.mark.parametrize(("m", "k", "words"), list(product(ROWS, WIDTHS, (8, 16, 32))))
def test_row_parts(m: int, k: int, words: int) -> None:
    tile = choose_row_parts(m, k, words, SMS)
    check_legal(tile)
    assert tile.steps * words <= 32


@pytest.mark.parametrize(("m", "k", "words"), list(product(ROWS, WIDTHS, (8, 16))))
def test_whole_rows(m: int, k: int, words: int) -> None:
    tile = choose_whole_rows(m, k, words, SMS)
    check_legal(tile)
    atoms = -(-k // 64)
    assert tile.blocks >= 4 * atoms
    assert tile.blocks - 4 * atoms < tile.lanes * tile.steps  # less than a warp is idle
    assert tile.steps * (words + 1) <= (68 if m >= 2 * SMS else 51)


def test_many_rows_fill_the_device() -> None:
    """64 bytes for each of 1024 threads per SM are in flight; scales leave in whole sectors."""
    for words in (8, 16):
        tile = choose_row_parts(8192, 4096, words, SMS)
        assert (tile.slots, tile.steps * words) == (8, 32)
    assert choose_whole_rows(8192, 2048, 8, SMS).slots == 8
    assert choose_whole_rows(8192, 4096, 16, SMS) == RowTile(slots=4, warps=8, steps=4)


def test_few_rows_are_spread() -> None:
    """One token of 16384 elements is split over 64 CTAs; whole rows get one CTA each."""
    parts = choose_row_parts(1, 16384, 8, SMS)
    assert 16384 // 16 // parts.blocks == 64
    assert choose_whole_rows(32, 4096, 8, SMS) == RowTile(slots=1, warps=8, steps=1)


@pytest.mark.parametrize(("words", "longest"), [(8, 40960), (16, 24576)])
def test_longest_row(words: int, longest: int) -> None:
    assert choose_whole_rows(1, longest, words, SMS).blocks * 16 == longest
    with pytest.raises(InvalidArgument, match=f"x: K is {longest + 16}, must be at most {longest}"):
        choose_whole_rows(1, longest + 16, words, SMS)
