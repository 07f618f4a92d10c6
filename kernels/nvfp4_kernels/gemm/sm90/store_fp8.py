"""E4M3 results in the order of ``formats.fp8_rows``: conversion and places."""

import cutlass
import cutlass.cute as cute
from cutlass import Array, Float32, Int32, Uint8, Uint32
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.formats.fp8_rows import GROUP


def place(column: Int32) -> Int32:
    """Byte of a row that holds element ``column``."""
    inside = column % GROUP
    block, element = inside // 16, inside % 16
    return column - inside + element % 8 // 2 * 16 + block * 4 + element % 2 * 2 + element // 8


def byte(value: Float32) -> Uint8:
    """Convert a value to E4M3, to nearest even, saturating."""
    return (_pair(value, Float32(0.0)) & Uint32(0xFF)).to(Uint8)


def store_words(
    slot: Array, token: int, warp: Int32, lane: Int32, values: list[list[Float32]]
) -> None:
    """Store a warp's results of 16 rows and 8 tokens as E4M3.

    A warp has a block of 16 elements of the group of 64: four words of each token, 16 bytes apart.
    Neighbouring lanes of a token exchange halves, so that each stores a word.

    Args:
        slot: bytes [token, 64].
        token: index of the first token in ``slot``.
        warp: index of the warp in its warpgroup.
        lane: index of the lane, which holds rows ``lane // 4`` and 8 further, and tokens
            ``lane % 4 · 2`` and the next.
        values: results of both tokens for the upper row, then for the lower row.
    """
    upper, lower = values
    own = _pair(upper[0], lower[0]) | _pair(upper[1], lower[1]) << 16
    other = Uint32(cute.arch.shuffle_sync_bfly(own, 4))
    odd = lane // 4 % 2
    # An even row's lane takes its pair's first token, an odd row's lane the second.
    selectors = Uint32(cutlass.select_(odd == 1, Uint32(0x3276), Uint32(0x5410)))
    word = ptx.inline_ptx(
        "prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Uint32],
        read_only_args=[own, other, selectors],
    )
    row = token + lane % 4 * 2 + odd
    at = row * GROUP + lane // 8 * 16 + warp * 4
    Array(slot.data_ptr(), shape=(1,), dtype=Uint32).store(word, at // 4)


def _pair(low: Float32, high: Float32) -> Uint32:
    """Two values as E4M3 in the lower half of a word."""
    return ptx.inline_ptx(
        "{ .reg .b16 pair, none; mov.b16 none, 0; "
        "cvt.rn.satfinite.e4m3x2.f32 pair, {$r1}, {$r0}; mov.b32 {$w0}, {pair, none}; }",
        write_only_types=[Uint32],
        read_only_args=[low, high],
    )
