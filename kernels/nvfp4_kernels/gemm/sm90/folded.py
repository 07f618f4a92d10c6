"""Decoding of folded weights in registers: E4M3 operands A of ``wgmma``.

The eight magnitudes of E2M1 times a scale s, as E4M3, are powers of two times s or times t, which
is 1.5 · s rounded to E4M3. A power of two adds 8 to an E4M3 byte for each doubling. So the values
of a block are a table of eight bytes in two registers, from which ``prmt`` looks up four codes at
a time; a code's sign is then set. See ``formats.folded`` for the layout.
"""

from typing import NamedTuple

from cutlass import Array, Int32, Uint32
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.formats.folded import HALVES, LANES

_BYTES = 0x01010101
_MAGNITUDES, _SIGNS = 0x77777777, 0x80808080
_DOUBLE, _FOUR_TIMES = 0x08, 0x10  # added to an E4M3 byte
_STEP = 4  # E4M3 steps from s to t, one more if the scale's flag is set


class _Scales(NamedTuple):
    """Bytes for the upper and lower row of the first, then of the second half of a K tile.

    Attributes:
        one: s of each block.
        more: 1.5 s, rounded to E4M3.
        half: s / 2.
    """

    one: Uint32
    more: Uint32
    half: Uint32


def operands(data: Array, scales: Array, warp: Int32, lane: Int32) -> list[list[Uint32]]:
    """Load and decode a lane's part of a K tile: four registers of operand A per K step of 32.

    Args:
        data: words of the K tile's codes.
        scales: words of the K tile's block scales.
        warp: index of the warp in its warpgroup.
        lane: index of the lane.
    """
    place = warp * LANES + lane
    factors = _scales(Uint32(scales.load(place)))
    steps: list[list[Uint32]] = []
    for half in range(HALVES):
        loaded = data.load((half * 4 * LANES + place) * 4, 4, alignment=16).to_elements()
        tables = [_table(factors, 2 * half + row) for row in range(2)]
        for step in range(2):
            words = (Uint32(loaded[2 * step + row]) for row in range(2))
            upper, lower = (_decoded(*each) for each in zip(words, tables, strict=True))
            steps.append([upper[0], lower[0], upper[1], lower[1]])
    return steps


def _scales(word: Uint32) -> _Scales:
    one = word & Uint32(~_SIGNS & 0xFFFFFFFF)
    flags = word >> 7 & Uint32(_BYTES)
    return _Scales(one, one + (flags + Uint32(_STEP * _BYTES)), one - Uint32(_DOUBLE * _BYTES))


def _table(scales: _Scales, block: int) -> tuple[Uint32, Uint32]:
    """Values of magnitudes 0 to 3 (0, s/2, s, 1.5 s) and 4 to 7 (2 s, 3 s, 4 s, 6 s)."""
    pairs = _picked(scales.one, scales.more, [block, 4 + block, block, 4 + block])
    zero = 8  # a selector of the sign of byte 0, which is positive
    low = _picked(pairs, scales.half, [zero, 4 + block, 0, 1])
    return low, pairs + Uint32(_FOUR_TIMES << 24 | _FOUR_TIMES << 16 | _DOUBLE << 8 | _DOUBLE)


def _decoded(word: Uint32, table: tuple[Uint32, Uint32]) -> tuple[Uint32, Uint32]:
    """Values of codes 0 to 3 and 4 to 7 of a word."""
    selectors = word & Uint32(_MAGNITUDES)
    signs = Uint32(_SIGNS)
    first = _permuted(*table, selectors) | word & signs
    return first, _permuted(*table, selectors >> 16) | word << 4 & signs


def _picked(low: Uint32, high: Uint32, selectors: list[int]) -> Uint32:
    return _permuted(low, high, Uint32(sum(each << 4 * n for n, each in enumerate(selectors))))


def _permuted(low: Uint32, high: Uint32, selectors: Uint32) -> Uint32:
    return ptx.inline_ptx(
        "prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Uint32],
        read_only_args=[low, high, selectors],
    )
