"""Copies of a warp's 32 rows between global and shared memory, with neighbouring lanes on one row.

In the softmax every thread has a row; coalesced accesses need several lanes per row. Rows are
exchanged through shared memory in the layout of the tensor core's operands, whose swizzle avoids
bank conflicts either way.
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Array, Boolean, Int32, Int64, Uint32, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.attention.sm100.tile import ROWS
from nvfp4_kernels.device.pinned import pinned
from nvfp4_kernels.sm100.limits import WARP_ROWS, widest_swizzle

VECTOR_BYTES = 16  # of a lane's load or store


@dataclass(frozen=True)
class WarpRows:
    """Thread layout of a warp over its 32 rows.

    Attributes:
        row_bytes: bytes of a row, a multiple of 16.
        lane: lane of this thread.
    """

    row_bytes: int
    lane: Int32

    @property
    def lanes_per_row(self) -> int:
        """Number of lanes per row: the largest power of two that divides the vectors per row."""
        vectors = self.row_bytes // VECTOR_BYTES
        return min(vectors & -vectors, WARP_ROWS)

    @property
    def vectors_per_lane(self) -> int:
        """Number of 16-byte vectors of a row per lane."""
        return self.row_bytes // VECTOR_BYTES // self.lanes_per_row

    @property
    def rows_per_iteration(self) -> int:
        """Number of rows that the warp accesses per iteration."""
        return WARP_ROWS // self.lanes_per_row

    @property
    def iterations(self) -> int:
        """Number of iterations over the warp's rows."""
        return WARP_ROWS // self.rows_per_iteration

    def row(self, iteration: int) -> Int32:
        """Row of the warp that this lane accesses in an iteration."""
        return self.lane // self.lanes_per_row + iteration * self.rows_per_iteration

    def byte(self, index: int) -> Int32:
        """Offset in bytes of this lane's ``index``-th vector in the lane's row."""
        return (self.lane % self.lanes_per_row + index * self.lanes_per_row) * VECTOR_BYTES

    def from_row_owner(self, value: Int32, iteration: int) -> Int32:
        """``value`` of the softmax thread that owns this lane's row of the iteration (shuffle)."""
        return cute.arch.shuffle_sync(value, self.row(iteration))


def recomputed_lane() -> Int32:
    """Lane index, computed anew, so that no earlier copy has to stay in a register."""
    return pinned(cute.arch.lane_idx())


def swizzled_offset(row_bytes: int, row: Int32, byte: Int32 | int) -> Int32:
    """Byte offset in a tile of 128 rows, [chunk, row, chunk bytes], swizzled in 16-byte units."""
    width = widest_swizzle(row_bytes)
    chunk, inside = byte // width, byte % width
    phase = (row * width >> 7) & (width // 16 - 1)
    return (chunk * ROWS + row) * width + (inside ^ (phase << 4))


def load_vector(data: cute.Pointer, units: Int32, byte: Int32, live: Boolean) -> Vector:
    """Load 16 bytes at ``units`` · 16 + ``byte`` after ``data``; zeros if not ``live``."""
    address = Int64(data.toint()) + Int64(units) * VECTOR_BYTES + byte
    # Predicated rather than branched around, so that all loads start before the thread waits.
    words = ptx.inline_ptx(
        "mov.b32 {$w0}, 0; mov.b32 {$w1}, 0; mov.b32 {$w2}, 0; mov.b32 {$w3}, 0; "
        "@{$r1} ld.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address, live],
    )
    return Vector.from_elements(tuple(words), Uint32)


def load_index(data: Array, index: Int32, live: Boolean) -> Int32:
    """Load the int32 at index ``index``; −1 if not ``live``."""
    # Predicated for the same reason.
    return ptx.inline_ptx(
        "mov.b32 {$w0}, -1; @{$r1} ld.global.b32 {$w0}, [{$r0}];",
        write_only_types=[Int32],
        read_only_args=[data.data_ptr(index), live],
    )


def store_vector(
    data: cute.Pointer, units: Int32, byte: Int32, vector: Vector, live: Boolean
) -> None:
    """Store 16 bytes at ``units`` · 16 + ``byte`` after ``data``, if ``live``."""
    address = Int64(data.toint()) + Int64(units) * VECTOR_BYTES + byte
    words = vector.bitcast(Uint32)
    ptx.inline_ptx(
        "@{$r1} st.global.v4.b32 [{$r0}], {{$r2}, {$r3}, {$r4}, {$r5}};",
        read_only_args=[address, live, words[0], words[1], words[2], words[3]],
    )
