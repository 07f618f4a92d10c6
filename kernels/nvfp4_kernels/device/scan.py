"""Exclusive scans over the threads of a warp or a CTA."""

import cutlass
import cutlass.cute as cute
from cutlass import Array, Int32
from cutlass.experimental import primitives as ptx

WARP = 32


def count_lanes_before(lane: Int32, lanes: Int32) -> Int32:
    """Number of lanes below ``lane`` in the bit mask ``lanes``."""
    return cute.arch.popc(lanes & ((Int32(1) << lane) - 1))


@cute.jit
def warp_exclusive_sum(lane: Int32, number: Int32) -> tuple[Int32, Int32]:
    """Sum of ``number`` over the lower lanes of the warp, and sum over all lanes."""
    included = number
    for step in cutlass.range_constexpr(5):
        earlier = cute.arch.shuffle_sync_up(included, 1 << step)
        if lane >= 1 << step:
            included += earlier
    return included - number, cute.arch.shuffle_sync(included, WARP - 1)


@cute.jit
def cta_exclusive_sum(
    warps: cutlass.Constexpr, thread: Int32, number: Int32, totals: Array
) -> tuple[Int32, Int32]:
    """Sum of ``number`` over the lower threads of the CTA, and sum over all threads.

    Args:
        warps: number of warps in the CTA; all threads take part.
        thread: index of this thread in the CTA.
        number: addend of this thread.
        totals: shared memory, one Int32 per warp, which no thread may still be reading.
    """
    lane, warp = thread % WARP, thread // WARP
    before, total = warp_exclusive_sum(lane, number)
    if lane == 0:
        totals.store(total, warp)
    ptx.barrier_cta_sync()
    other = Int32(0)
    if lane < warps:
        other = totals[lane]
    earlier = Int32(cutlass.select_(lane < warp, other, Int32(0)))
    earlier = cute.arch.warp_redux_sync(earlier, "add")
    return earlier + before, cute.arch.warp_redux_sync(other, "add")
