"""Interface between the epilogue and consumers of scores: logits store, or fused top-k."""

from dataclasses import dataclass
from typing import Any, Protocol

import cutlass.cute as cute
from cutlass import Float32, Int32

from nvfp4_kernels.indexer.sm100.scheduler import KeyRanges, TileScheduler
from nvfp4_kernels.sm100.limits import WARP_ROWS


@dataclass(frozen=True)
class EpilogueCoord:
    """Coordinate of an epilogue warp.

    Attributes:
        group: index of the group of queries whose scores the warp computes.
        pingpong: index of the warp's ping-pong set; sets take key tiles alternately.
        warp: index of the warp among the four warps with this group and set; the warp reads 32
            lanes of tensor memory.
    """

    group: Int32
    pingpong: Int32
    warp: Int32

    @property
    def lane(self) -> Int32:
        """Tensor memory lane of this thread: the index of the thread's key in a key tile."""
        return self.warp * WARP_ROWS + cute.arch.lane_idx()


class ScoreVisitor(Protocol):
    """Epilogue visitor that consumes scores; a frozen dataclass, compiled into the kernel.

    All threads of an epilogue warp call ``begin``, ``begin_phase``, ``visit`` and ``end`` together.
    ``out`` is the launch's output, ``storage`` the result of ``allocate``.
    """

    def min_keys(self, out: Any) -> Int32:
        """Fewest visible keys for which a query is scored."""

    def allocate(self) -> Any:
        """Allocate the visitor's shared memory, at most ``tile.visitor_bytes``."""

    def begin(
        self, out: Any, storage: Any, ranges: KeyRanges, scheduler: TileScheduler,
        coord: EpilogueCoord,
    ) -> Any:  # fmt: skip
        """State of this thread for the queries of group ``coord.group``; called before all scores.

        The other methods get this state.
        """

    def begin_phase(self, state: Any, scheduler: TileScheduler, phase: Int32) -> None:
        """Hook before each phase, in which every accumulator holds at most one key tile.

        The warps of a group, of all ping-pong sets, may synchronise.
        """

    def visit(self, state: Any, number: int, key: Int32, score: Float32) -> None:
        """Consume a key's score for the ``number``-th query of the group.

        The key may be one that the query does not see, and the query may be absent.
        """

    def end(self, state: Any, scheduler: TileScheduler) -> None:
        """Hook after all scores."""
