"""Broadcast of work tiles from the scheduler warp to all warps of a CTA, through shared memory."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Array, Boolean, Int32, Int64, Vector
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.attention.sm100.scheduler import PipelineCounts, Sizes, WorkTile
from nvfp4_kernels.device.mbarrier import wait

_FIELDS = (
    "batch", "kv_head", "split", "first_row", "rows", "first_query", "first_key", "keys",
    "position", "first_tile", "parts",
)  # fmt: skip
_WORDS = 16
_VECTOR = 4  # words of a load


@dataclass(frozen=True)
class WorkTileBroadcast:
    """Broadcast of work tiles: the scheduler warp writes a work tile, and all other warps read it.

    Lengths and indices, which cost two loads and some divisions, are thus ready before the previous
    work tile is done. The last write says that no work tile follows.

    Attributes:
        words: int32 words of the work tile.
        full: mbarrier of arrive count 1, completed when the work tile is written.
        empty: mbarrier, completed by an arrival of each reading warp.
    """

    words: Array
    full: Array
    empty: Array

    @staticmethod
    def allocate() -> "WorkTileBroadcast":
        """Allocate shared memory for a work tile and the barriers."""
        words = Array(Int32, _WORDS, space=AddressSpace.smem, alignment=16)
        full, empty = (Array(Int64, 1, space=AddressSpace.smem, alignment=8) for _ in range(2))
        return WorkTileBroadcast(words, full, empty)

    def init(self, readers: int) -> None:
        """Initialise the barriers for ``readers`` reading warps; the caller must fence."""
        ptx.mbarrier_init(self.full, 1)
        ptx.mbarrier_init(self.empty, readers)

    @cute.jit
    def write(self, phase: Int32, more: Boolean, work: WorkTile) -> None:
        """Write the ``phase``-th work tile; without ``more``, the end marker.

        Only the scheduler warp calls this, after all warps have read the previous work tile.
        """
        values = [Int32(more), *(getattr(work, name) for name in _FIELDS), *work.tiles]
        values += [Int32(0)] * (_WORDS - len(values))
        if ptx.elect_sync():
            for first in cutlass.range_constexpr(0, _WORDS, _VECTOR):
                part = Vector.from_elements(tuple(values[first : first + _VECTOR]), Int32)
                self.words.store(part, first, alignment=16)
            ptx.mbarrier_arrive(self.full)

    def wait_read(self, phase: Int32) -> None:
        """Wait until all reading warps have read the ``phase``-th work tile."""
        wait(self.empty, phase)

    @cute.jit
    def read(self, phase: Int32) -> list[Int32]:
        """Read the words of work tile ``phase``; each reading warp calls this once per tile."""
        wait(self.full, phase)
        words = [
            word
            for first in range(0, _WORDS, _VECTOR)
            for word in self.words.load(first, _VECTOR, alignment=16).to_elements()
        ]
        ptx.bar_warp_sync(cute.arch.FULL_MASK)
        if ptx.elect_sync():
            ptx.mbarrier_arrive(self.empty)
        return words


def work_of(words: list[Int32], query_tiles: int, sizes: Sizes, before: PipelineCounts) -> WorkTile:
    """Work tile decoded from the words of ``WorkTileBroadcast.read``."""
    named = dict(zip(_FIELDS, words[1:], strict=False))
    tiles = words[1 + len(_FIELDS) :][:query_tiles]
    return WorkTile(**named, tiles=tiles, group=sizes.group, window=sizes.window, before=before)
