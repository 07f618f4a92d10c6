"""Waits on mbarriers, and predicated arrivals."""

import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Int32
from cutlass.experimental import primitives as ptx

CTA = ptx.MBarrierScope.CTA
CLUSTER = ptx.MBarrierScope.CLUSTER


@cute.jit
def wait(barrier: Array, phase: Int32, scope: cutlass.Constexpr = CTA) -> None:
    """Block until phase ``phase`` of an mbarrier, counted from 0, is complete.

    Phase -1 counts as complete. ``scope`` is the acquire scope for ordinary stores: cluster scope
    costs an invalidation of L1. Data moved by TMA or accessed by the tensor core does not need
    cluster scope, even from another CTA.
    """
    while not ptx.mbarrier_try_wait_parity(
        barrier, phase & 1, scope=scope, order=ptx.MemOrder.ACQUIRE
    ):
        pass


def arrive_where(barrier: Array, arrives: Boolean) -> None:
    """Arrive at an mbarrier of this CTA if ``arrives``, by a predicated instruction.

    A branch would split the surrounding code into basic blocks with less instruction-level
    parallelism.
    """
    ptx.inline_ptx(
        "mbarrier.arrive.shared.b64 _, [{$r0}];", read_only_args=[barrier], predicate=arrives
    )
