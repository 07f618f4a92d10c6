"""Arrivals of a warp at mbarriers."""

import cutlass.cute as cute
from cutlass import Array, Boolean
from cutlass.experimental import primitives as ptx


@cute.jit
def fence_and_arrive(barrier: Array, leader: Boolean) -> None:
    """Arrive after a fence: waiting threads' tensor memory accesses follow this warp's accesses."""
    ptx.tcgen05_fence(ptx.Tcgen05Fence.BEFORE_THREAD_SYNC)
    ptx.bar_warp_sync(cute.arch.FULL_MASK)
    if leader:
        ptx.mbarrier_arrive(barrier)
