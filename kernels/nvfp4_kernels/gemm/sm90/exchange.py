"""Exchange between the gate and the up warpgroup: each gets both sums of half of the tokens."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Float32, Int32, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.formats.fragments import TILE
from nvfp4_kernels.gemm.sm90.tile import BARRIER, EpilogueConfig, Tile
from nvfp4_kernels.sm90.limits import WARPGROUP

FOUR = 4  # floats that move at once


@dataclass(frozen=True)
class Exchange:
    """Exchange of fragments through the epilogue's transpose buffer.

    Both warpgroups have the same fragment layout, so that threads with the same index exchange
    values.
    """

    tile: Tile
    output: EpilogueConfig

    def run(self, sums: list[Float32], scratch: Array, group: Int32) -> list[list[Float32]]:
        """Exchange sums; return the gate and up sums of the tokens that this warpgroup finishes.

        Args:
            sums: sums of this warpgroup's weight, for all tokens.
            scratch: the epilogue's scratch memory, of any dtype.
            group: index of the warpgroup; 0 has the gate and finishes the first half of the tokens.
        """
        first = group == 0
        half, count = self.tile.own_tokens // 2, self.output.box_tokens(self.tile) // 2
        sides = list(zip(sums[:half], sums[half:], strict=True))
        kept = [_either(first, lower, upper) for lower, upper in sides]
        given = [_either(first, upper, lower) for lower, upper in sides]
        own, other = self._area(scratch, group), self._area(scratch, 1 - group)
        taken: list[Float32] = []
        for start in range(0, half, count):
            self._sync()  # what lay here has been read
            for at in range(0, count, FOUR):
                four = given[start + at : start + at + FOUR]
                other.store(Vector.from_elements(tuple(four), Float32), _place(at), alignment=16)
            self._sync()
            for at in range(0, count, FOUR):
                values = own.load(_place(at), FOUR, alignment=16)
                taken += [Float32(values[i]) for i in range(FOUR)]
        pairs = list(zip(kept, taken, strict=True))
        return [[_either(first, k, t) for k, t in pairs], [_either(first, t, k) for k, t in pairs]]

    def _area(self, scratch: Array, group: Int32) -> Array:
        """Part of the scratch memory from which warpgroup ``group`` reads, as float32."""
        floats = self.output.shared_bytes(self.tile) // 4 // self.tile.warpgroups
        assert TILE * self.output.box_tokens(self.tile) <= floats
        return Array(scratch.data_ptr(), shape=(1,), dtype=Float32).subview(group * floats)

    def _sync(self) -> None:
        """Barrier over the threads of both warpgroups."""
        threads = self.tile.warpgroups * WARPGROUP
        ptx.barrier_cta_sync(BARRIER + self.tile.warpgroups, thread_count=threads)


def _place(at: int) -> Int32:
    """Offset of a thread's four values; values of neighbouring threads are contiguous."""
    return at * WARPGROUP + cute.arch.thread_idx()[0] % WARPGROUP * FOUR


def _either(condition: cutlass.Boolean, one: Float32, other: Float32) -> Float32:
    return Float32(cutlass.select_(condition, one, other))
