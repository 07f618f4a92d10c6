"""The seam between scores and what becomes of them: rows of logits, or the best keys."""

from dataclasses import dataclass
from typing import Any, Protocol

import cutlass.cute as cute
from cutlass import Float32, Int32

from nvfp4_kernels.indexer.sm100.scheduler import Ranges, Work
from nvfp4_kernels.sm100.limits import WARP_ROWS


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


class Consumer(Protocol):
    """Takes the scores, such as ``LogitRows``; a frozen dataclass, compiled into its kernel.

    All threads of an epilogue warp call ``open`` and what follows it at once.
    """

    def least(self, out: Any) -> Int32:
        """Keys that a query must see to be scored."""

    def memory(self) -> Any:
        """Shared memory of its own, ``tile.consumer_bytes`` at the most."""

    def open(self, out: Any, memory: Any, ranges: Ranges, work: Work, place: Place) -> Any:
        """What a thread keeps of the queries of its group; no score comes before."""

    def meet(self, kept: Any, work: Work, lap: Int32) -> None:
        """Comes before each lap, after which each group has scored ``tile.accumulators`` tiles.

        The warps of a group may wait for one another.
        """

    def put(self, kept: Any, number: int, key: Int32, score: Float32) -> None:
        """A key's score for a query of the group, which need not see it, nor be there at all."""

    def close(self, kept: Any, work: Work) -> None:
        """No score comes after."""
