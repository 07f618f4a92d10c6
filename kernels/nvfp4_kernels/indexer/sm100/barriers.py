"""The mbarriers by which the warps of a CTA hand key tiles to one another."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Array, Int64
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.indexer.sm100.tile import GROUP_WARPS, ScoreTile


@dataclass(frozen=True)
class Barriers:
    """All of a CTA. Phases are counted from 0.

    | barrier | arrivals | by | phase |
    |---|---|---|---|
    | ``asked`` | 1 and its bytes | copies of the queries | 0 |
    | ``graded`` | 1 | scale warp: the queries' scales are in shared memory | 0 |
    | ``full[stage]`` | 1 and its bytes | copies into the ring | turn of the stage |
    | ``scaled[stage]`` | 1 | scale warp: the keys' scales are there | turn of the stage |
    | ``empty[stage]`` | 1 | commit of the MMAs that read it | turn of the stage |
    |  | and 4 per group | epilogue warps, if they read keys' factors | the same |
    | ``ready[accumulator]`` | 1 | commit of its MMAs | turn of the accumulator |
    | ``drained[accumulator]`` | 4 per group | epilogue warps: it is in registers | the same |
    """

    asked: Array
    graded: Array
    full: Array
    scaled: Array
    empty: Array
    ready: Array
    drained: Array


def new_barriers(tile: ScoreTile) -> Barriers:
    """Shared memory for them."""

    def barriers(count: int) -> Array:
        return Array(Int64, count, space=AddressSpace.smem, alignment=8)

    return Barriers(
        asked=barriers(1),
        graded=barriers(1),
        full=barriers(tile.stages),
        scaled=barriers(tile.stages),
        empty=barriers(tile.stages),
        ready=barriers(tile.accumulators),
        drained=barriers(tile.accumulators),
    )


@cute.jit
def initialise(tile: cutlass.Constexpr, barriers: Barriers) -> None:
    """By one thread."""
    warps = GROUP_WARPS * tile.groups
    readers = warps if tile.factored else 0
    ptx.mbarrier_init(barriers.asked, 1)
    ptx.mbarrier_init(barriers.graded, 1)
    for stage in cutlass.range_constexpr(tile.stages):
        ptx.mbarrier_init(barriers.full.subview(stage), 1)
        ptx.mbarrier_init(barriers.scaled.subview(stage), 1)
        ptx.mbarrier_init(barriers.empty.subview(stage), 1 + readers)
    for accumulator in cutlass.range_constexpr(tile.accumulators):
        ptx.mbarrier_init(barriers.ready.subview(accumulator), 1)
        ptx.mbarrier_init(barriers.drained.subview(accumulator), warps)
    ptx.fence_mbarrier_init()
