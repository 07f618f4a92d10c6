"""A warp's 32 rows between global and shared memory, neighbouring lanes on neighbouring bytes.

The softmax gives every thread a row of its own; memory wants several lanes on each row. Rows meet
in shared memory, in the layout of the tensor core's operands, whose swizzle spreads them over the
banks whichever way they are read.
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Array, Boolean, Int32, Int64, Uint32, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.attention.sm100.tile import ROWS
from nvfp4_kernels.sm100.limits import WARP_ROWS, widest_swizzle

PIECE = 16  # bytes that a lane moves at once


@dataclass(frozen=True)
class WarpRows:
    """How lanes are laid over rows of ``row_bytes``.

    Attributes:
        row_bytes: a multiple of 16.
        lane: this thread's.
    """

    row_bytes: int
    lane: Int32

    @property
    def lanes(self) -> int:
        """Lanes on one row: the largest power of two that shares it evenly."""
        pieces = self.row_bytes // PIECE
        return min(pieces & -pieces, WARP_ROWS)

    @property
    def pieces(self) -> int:
        """Of each lane in a row."""
        return self.row_bytes // PIECE // self.lanes

    @property
    def at_once(self) -> int:
        """Rows that the warp touches at once."""
        return WARP_ROWS // self.lanes

    @property
    def turns(self) -> int:
        return WARP_ROWS // self.at_once

    def row(self, turn: int) -> Int32:
        """Which of the warp's rows this lane has."""
        return self.lane // self.lanes + turn * self.at_once

    def byte(self, number: int) -> Int32:
        """Where a piece of this lane begins in its row."""
        return (self.lane % self.lanes + number * self.lanes) * PIECE

    def of_row(self, own: Int32, turn: int) -> Int32:
        """What the thread to which the softmax gives this lane's row has in ``own``."""
        return cute.arch.shuffle_sync(own, self.row(turn))


def fresh_lane() -> Int32:
    """The lane, so that what follows from it is computed again, not kept from an earlier use."""
    lane = cute.arch.lane_idx()
    return ptx.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[lane])


def place_of(row_bytes: int, row: Int32, byte: Int32 | int) -> Int32:
    """Offset in a tile of 128 rows: [chunk, row, chunk bytes], swizzled in units of 16 bytes."""
    width = widest_swizzle(row_bytes)
    chunk, inside = byte // width, byte % width
    turned = (row * width >> 7) & (width // 16 - 1)
    return (chunk * ROWS + row) * width + (inside ^ (turned << 4))


def load_piece(data: cute.Pointer, units: Int32, byte: Int32, live: Boolean) -> Vector:
    """16 bytes, ``units`` · 16 + ``byte`` after ``data``; zeros if not ``live``."""
    address = Int64(data.toint()) + Int64(units) * PIECE + byte
    # Predicated rather than branched around, so that all loads start before the thread waits.
    words = ptx.inline_ptx(
        "mov.b32 {$w0}, 0; mov.b32 {$w1}, 0; mov.b32 {$w2}, 0; mov.b32 {$w3}, 0; "
        "@{$r1} ld.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address, live],
    )
    return Vector.from_elements(tuple(words), Uint32)


def load_index(data: Array, index: Int32, live: Boolean) -> Int32:
    """An int32; −1 if not ``live``."""
    # Predicated as above.
    return ptx.inline_ptx(
        "mov.b32 {$w0}, -1; @{$r1} ld.global.b32 {$w0}, [{$r0}];",
        write_only_types=[Int32],
        read_only_args=[data.data_ptr(index), live],
    )


def store_piece(
    data: cute.Pointer, units: Int32, byte: Int32, piece: Vector, live: Boolean
) -> None:
    """16 bytes, if ``live``."""
    address = Int64(data.toint()) + Int64(units) * PIECE + byte
    words = piece.bitcast(Uint32)
    ptx.inline_ptx(
        "@{$r1} st.global.v4.b32 [{$r0}], {{$r2}, {$r3}, {$r4}, {$r5}};",
        read_only_args=[address, live, words[0], words[1], words[2], words[3]],
    )
