"""The mbarriers by which the warps of a CTA hand tiles to one another."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Array, Int32, Int64
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.attention.sm100.tile import WARPS, AttentionTile
from nvfp4_kernels.device.mbarrier import wait


@dataclass(frozen=True)
class Barriers:
    """All of a CTA. Phases are counted from 0.

    With two buffers of S, a softmax may be a key tile ahead of PV, and QK one ahead of both: what
    they signal has a barrier per buffer, so that nobody waits for a phase but the next.

    | barrier | arrivals | by | phase |
    |---|---|---|---|
    | ``full[stage]`` | 1 and its bytes | copies into the ring | turn of the stage |
    | ``empty[stage]`` | 1 | commit of the MMAs that read it | turn of the stage |
    | ``clean`` | 1 and its bytes | copies of the tile whose end is cleared | 0 |
    | ``asked[query tile]`` | 4 | softmax warps: Q is in shared memory | 0 |
    | ``scored[query tile, buffer]`` | 1 | commit of QK | turn of it |
    | ``taken[query tile]`` | 4 | softmax warps: S is in registers | key tile |
    | ``weighed[query tile, buffer]`` | 4 | softmax warps: P there, O rescaled | turn of it |
    | ``added[query tile, buffer]`` | 1 | commit of PV | turn of it |
    """

    full: Array
    empty: Array
    clean: Array
    asked: Array
    scored: Array
    taken: Array
    weighed: Array
    added: Array


def new_barriers(tile: AttentionTile) -> Barriers:
    """Shared memory for them."""

    def barriers(count: int) -> Array:
        return Array(Int64, count, space=AddressSpace.smem, alignment=8)

    return Barriers(
        full=barriers(tile.stages),
        empty=barriers(tile.stages),
        clean=barriers(1),
        asked=barriers(tile.query_tiles),
        scored=barriers(tile.query_tiles * tile.score_buffers),
        taken=barriers(tile.query_tiles),
        weighed=barriers(tile.query_tiles * tile.score_buffers),
        added=barriers(tile.query_tiles * tile.score_buffers),
    )


@cute.jit
def initialise(tile: cutlass.Constexpr, barriers: Barriers) -> None:
    """By one thread."""
    for stage in cutlass.range_constexpr(tile.stages):
        ptx.mbarrier_init(barriers.full.subview(stage), 1)
        ptx.mbarrier_init(barriers.empty.subview(stage), 1)
    ptx.mbarrier_init(barriers.clean, 1)
    for each in cutlass.range_constexpr(tile.query_tiles):
        ptx.mbarrier_init(barriers.asked.subview(each), WARPS)
        ptx.mbarrier_init(barriers.taken.subview(each), WARPS)
    for each in cutlass.range_constexpr(tile.query_tiles * tile.score_buffers):
        ptx.mbarrier_init(barriers.scored.subview(each), 1)
        ptx.mbarrier_init(barriers.weighed.subview(each), WARPS)
        ptx.mbarrier_init(barriers.added.subview(each), 1)
    ptx.fence_mbarrier_init()


@cute.jit
def wait_for_output(
    tile: cutlass.Constexpr, barriers: Barriers, query_tile: Int32, index: Int32
) -> None:
    """Until PV of the ``index``-th key tile is done: O may be read, and P overwritten."""
    buffers = tile.score_buffers
    added = barriers.added.subview(query_tile * buffers + index % buffers)
    wait(added, index // buffers)
    ptx.tcgen05_fence(ptx.Tcgen05Fence.AFTER_THREAD_SYNC)


@cute.jit
def wait_for_weights(
    tile: cutlass.Constexpr, barriers: Barriers, query_tile: cutlass.Constexpr, index: Int32
) -> None:
    """Until P of the ``index``-th key tile is there, and O rescaled for it."""
    buffers = tile.score_buffers
    wait(barriers.weighed.subview(query_tile * buffers + index % buffers), index // buffers)
    ptx.tcgen05_fence(ptx.Tcgen05Fence.AFTER_THREAD_SYNC)
