"""Interface between the epilogue and what becomes of its scores: logits, or the best keys."""

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
        group: group of queries whose scores it forms.
        pingpong: its set of groups; sets take key tiles alternately.
        warp: warp of the group: 32 lanes of tensor memory.
    """

    group: Int32
    pingpong: Int32
    warp: Int32

    @property
    def lane(self) -> Int32:
        """Lane of tensor memory of this thread, and of its key in a tile."""
        return self.warp * WARP_ROWS + cute.arch.lane_idx()


class ScoreVisitor(Protocol):
    """Epilogue visitor that takes the scores; a frozen dataclass, compiled into its kernel.

    All threads of an epilogue warp call ``begin`` and what follows it together.
    """

    def min_keys(self, out: Any) -> Int32:
        """Keys that a query must see to be scored."""

    def allocate(self) -> Any:
        """Allocate shared memory, ``tile.visitor_bytes`` at most."""

    def begin(
        self, out: Any, storage: Any, ranges: KeyRanges, scheduler: TileScheduler,
        coord: EpilogueCoord,
    ) -> Any:  # fmt: skip
        """State that a thread keeps for the queries of its group; precedes all scores."""

    def begin_phase(self, state: Any, scheduler: TileScheduler, phase: Int32) -> None:
        """Precede a phase, in which each group scores up to ``tile.accumulators`` key tiles.

        The warps of a group may wait for one another.
        """

    def visit(self, state: Any, number: int, key: Int32, score: Float32) -> None:
        """Take a key's score for the ``number``-th query of the group.

        The query need not see the key, nor exist.
        """

    def end(self, state: Any, scheduler: TileScheduler) -> None:
        """Follow all scores."""
