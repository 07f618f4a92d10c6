"""Mbarriers of the GEMM's two pipelines, of operands and of accumulators."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Array, Int32, Int64
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.gemm.sm100.tile import EPILOGUE_WARPS, Tile


@dataclass(frozen=True)
class Barriers:
    """Mbarriers in shared memory, one per stage or accumulator.

    | barrier | arrive count | arrivals by |
    |---|---|---|
    | ``full[stage]``, in the tile's first CTA | 1, and bytes | the weights' loader; TMA copies |
    | ``empty[stage]`` | tiles of the cluster that read this CTA's loads | the tiles' MMA commits |
    | ``acc_full[accumulator]``, in each CTA of the tile | 1 | the tile's last MMA commit |
    | ``acc_empty[accumulator]``, in the tile's first CTA | 4 per CTA of the tile | epilogue warps |
    """

    full: Array
    empty: Array
    acc_full: Array
    acc_empty: Array


@dataclass(frozen=True)
class ArriveCounts:
    """Number of arrivals that complete a phase, for each barrier of ``Barriers``."""

    full: int
    empty: int
    acc_full: int
    acc_empty: int


class PipelineState(NamedTuple):
    """Stage of a ring that a role uses next.

    Attributes:
        index: index of the stage.
        phase: number of the trip around the ring, from 0.
    """

    index: Int32
    phase: Int32

    def advance(self, stages: int) -> "PipelineState":
        """State for the next stage of a ring of ``stages``.

        Index and phase are incremented, not derived from a count by a division, which would delay
        the first load.
        """
        wraps = self.index == stages - 1
        index = cutlass.select_(wraps, Int32(0), self.index + 1)
        return PipelineState(index, self.phase + Int32(wraps))


def arrive_counts(tile: Tile) -> ArriveCounts:
    """Arrive counts of a tile's barriers."""
    readers = 1 if tile.split_k > 1 else tile.cluster_n + tile.cluster_m // tile.ctas - 1
    return ArriveCounts(full=1, empty=readers, acc_full=1, acc_empty=EPILOGUE_WARPS * tile.ctas)


def shared_barriers(tile: Tile, stages: int) -> Barriers:
    """Allocate the barriers in shared memory."""
    return Barriers(
        full=mbarriers(stages),
        empty=mbarriers(stages),
        acc_full=mbarriers(tile.accumulators),
        acc_empty=mbarriers(tile.accumulators),
    )


def mbarriers(count: int) -> Array:
    """Allocate ``count`` mbarriers in shared memory."""
    return Array(Int64, count, space=AddressSpace.smem, alignment=8)


@cute.jit
def init_barriers(barriers: Barriers, tile: cutlass.Constexpr, stages: cutlass.Constexpr) -> None:
    """Initialise every barrier of the pipelines; called by one thread.

    For addresses that depend on the lane ptxas emits another code path for sm_100, which
    invalidates the SM's cache of mbarriers.
    """
    counts = arrive_counts(tile)
    for stage in cutlass.range_constexpr(stages):
        ptx.mbarrier_init(barriers.full.subview(stage), counts.full)
        ptx.mbarrier_init(barriers.empty.subview(stage), counts.empty)
    for accumulator in cutlass.range_constexpr(tile.accumulators):
        ptx.mbarrier_init(barriers.acc_full.subview(accumulator), counts.acc_full)
        ptx.mbarrier_init(barriers.acc_empty.subview(accumulator), counts.acc_empty)
    # To the cluster, or to this CTA's TMA: the wider fence takes hundreds of cycles.
    if cutlass.const_expr(tile.coupled):
        ptx.fence_mbarrier_init()
    else:
        ptx.fence_proxy(ptx.Proxy.ASYNC_SHARED, space=ptx.SharedSpace.shared_cta)
