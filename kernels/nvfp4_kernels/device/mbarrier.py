"""Waiting on mbarriers."""

import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Int32
from cutlass.experimental import primitives as ptx

CTA = ptx.MBarrierScope.CTA
CLUSTER = ptx.MBarrierScope.CLUSTER


@cute.jit
def wait(barrier: Array, phase: Int32, scope: cutlass.Constexpr = CTA) -> None:
    """Blocks until the mbarrier's phase of this number, counted from 0, is complete.

    Phase -1 counts as complete. ``scope`` says whose ordinary stores are visible from here on:
    those of the cluster cost an invalidation of L1. Tiles that TMA brings and what the tensor core
    reads and writes are not among them, whichever CTA they come from.
    """
    while not ptx.mbarrier_try_wait_parity(
        barrier, phase & 1, scope=scope, order=ptx.MemOrder.ACQUIRE
    ):
        pass


def arrive_where(barrier: Array, arrives: Boolean) -> None:
    """Arrive at an mbarrier of this CTA where ``arrives`` holds, by a predicate.

    Code around a branch ends up on either side of it, where less can run at a time.
    """
    ptx.inline_ptx(
        "mbarrier.arrive.shared.b64 _, [{$r0}];", read_only_args=[barrier], predicate=arrives
    )
