"""The seam between scores and what becomes of them: rows of logits, or the best keys.

A consumer, such as ``LogitRows``, is a frozen dataclass that its kernel is compiled with. But for
the first two methods, whole epilogue warps call them, in this order:

| method | |
|---|---|
| ``least(out)`` | keys that a query must see to be scored |
| ``memory()`` | its shared memory, ``tile.consumer_bytes`` at the most |
| ``open(out, memory, ranges, work, place)`` | what a thread keeps of its queries |
| ``meet(kept, work, step)`` | before each key tile: the warps of a group may wait for one another |
| ``put(kept, number, key, score)`` | a key's score for the ``number``-th query of the group |
| ``close(kept, work)`` | after the last key tile |
"""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32

from nvfp4_kernels.sm100.tile import WARP_ROWS


@dataclass(frozen=True)
class Place:
    """Which warp of the epilogue this is.

    Attributes:
        group: of queries.
        turn: which of the key tiles it takes.
        warp: of its group: 32 lanes of tensor memory.
    """

    group: Int32
    turn: Int32
    warp: Int32

    @property
    def lane(self) -> Int32:
        """This thread's of tensor memory, and its key's in a tile."""
        return self.warp * WARP_ROWS + cute.arch.lane_idx()
