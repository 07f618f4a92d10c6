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
        group: group of queries whose scores the warp forms.
        pingpong: index of the warp's set of groups; sets take key tiles alternately.
        warp: warp of the group: 32 lanes of tensor memory.
    """

    group: Int32
    pingpong: Int32
    warp: Int32

    @property
    def lane(self) -> Int32:
        """Tensor-memory lane of this thread, and index of its key in the key tile."""
        return self.warp * WARP_ROWS + cute.arch.lane_idx()


class ScoreVisitor(Protocol):
    """Epilogue visitor that consumes scores; a frozen dataclass, compiled into its kernel.

    All threads of an epilogue warp call ``begin`` and the later methods together.
    """

    def min_keys(self, out: Any) -> Int32:
        """Fewest visible keys for which a query is scored."""

    def allocate(self) -> Any:
        """Allocate at most ``tile.visitor_bytes`` of shared memory."""

    def begin(
        self, out: Any, storage: Any, ranges: KeyRanges, scheduler: TileScheduler,
        coord: EpilogueCoord,
    ) -> Any:  # fmt: skip
        """State of a thread for the queries of its group; called before all scores."""

    def begin_phase(self, state: Any, scheduler: TileScheduler, phase: Int32) -> None:
        """Hook before each phase, in which a group scores up to ``tile.accumulators`` key tiles.

        The warps of a group may synchronise.
        """

    def visit(self, state: Any, number: int, key: Int32, score: Float32) -> None:
        """Consume a key's score for the ``number``-th query of the group.

        The key may be masked, and the query absent.
        """

    def end(self, state: Any, scheduler: TileScheduler) -> None:
        """Hook after all scores."""
