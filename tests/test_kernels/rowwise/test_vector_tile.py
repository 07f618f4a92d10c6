"""Layout of a CTA's threads over a row in vectors of 8: pure functions of the shape."""

from itertools import product

import pytest

from nvfp4_kernels import InvalidArgument
from nvfp4_kernels.device.row_vectors.tile import (
    MAX_THREADS,
    VectorTile,
    choose_row_parts,
    choose_whole_rows,
    longest_row,
)
from nvfp4_kernels.sm90.limits import SMS

ROWS = (1, 17, 200, 1024, 100_000)
WIDTHS = (16, 80, 2064, 4096, 7168, 14336, 24576)


def check_legal(tile: VectorTile) -> None:
    assert tile.threads % 32 == 0
    assert 32 <= tile.threads <= MAX_THREADS
    # Parts of a row must begin at a group of 64 elements.
    assert tile.elements % 64 == 0


@pytest.mark.parametrize(("m", "k", "words"), list(product(ROWS, WIDTHS, (4, 8, 16))))
def test_row_parts(m: int, k: int, words: int) -> None:
    tile = choose_row_parts(m, k, words, SMS)
    check_legal(tile)
    assert tile.steps * words <= 32
    parts = -(-k // tile.elements)
    idle = parts * tile.elements - k
    assert idle < 8 * 32 * tile.steps * parts + 8 * tile.threads * (tile.steps == 1)


@pytest.mark.parametrize(("m", "k", "words"), list(product(ROWS, WIDTHS, (4, 8))))
def test_whole_rows(m: int, k: int, words: int) -> None:
    tile = choose_whole_rows(m, k, words, SMS)
    check_legal(tile)
    assert k <= tile.elements
    assert tile.elements - k < 8 * 32 * tile.steps + 8 * tile.threads  # less than a warp or step
    assert tile.steps * words <= 32


def test_many_rows_fill_the_device() -> None:
    """128 bytes per thread are in flight, gate and up of two steps, or one of four."""
    assert choose_row_parts(8192, 4096, 4, SMS) == VectorTile(threads=128, steps=4)
    assert choose_row_parts(8192, 14336, 4, SMS) == VectorTile(threads=224, steps=4)
    assert choose_row_parts(8192, 14336, 8, SMS) == VectorTile(threads=224, steps=4)
    assert choose_row_parts(8192, 4096, 16, SMS) == VectorTile(threads=256, steps=2)
    assert choose_whole_rows(8192, 4096, 4, SMS) == VectorTile(threads=256, steps=2)
    assert choose_whole_rows(8192, 14336, 4, SMS) == VectorTile(threads=256, steps=7)


def test_few_rows_are_spread() -> None:
    """One token of 16384 elements is split over 16 CTAs; a whole row gets twice the threads."""
    parts = choose_row_parts(1, 16384, 4, SMS)
    assert 16384 // parts.elements == 16
    assert choose_row_parts(1, 80, 4, SMS) == VectorTile(threads=32, steps=1)
    assert choose_whole_rows(32, 4096, 4, SMS) == VectorTile(threads=512, steps=1)


@pytest.mark.parametrize(("words", "longest"), [(4, 49152), (8, 24576)])
def test_longest_row(words: int, longest: int) -> None:
    assert longest_row(words) == longest
    assert choose_whole_rows(1, longest, words, SMS).elements == longest
    with pytest.raises(InvalidArgument, match=f"x: K is {longest + 16}, must be at most {longest}"):
        choose_whole_rows(1, longest + 16, words, SMS)
