"""Waits on mbarriers, predicated arrivals, and stores that an mbarrier counts."""

from collections.abc import Sequence

import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Float32, Int32
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


def store_async(target: Array, values: Sequence[Float32], barrier: Array) -> None:
    """Store 1, 2 or 4 float32 values in shared memory of a CTA of the cluster (PTX ISA, st.async).

    Args:
        target: place in that CTA's shared memory, from ``mapa``; aligned to all values.
        values: values of this thread.
        barrier: mbarrier of the same CTA, from ``mapa``, which counts their bytes; a wait on it at
            cluster scope sees the values.
    """
    count = len(values)
    places = ", ".join(f"{{$r{n + 1}}}" for n in range(count))
    vector, source = (f".v{count}", f"{{{places}}}") if count > 1 else ("", places)
    ptx.inline_ptx(
        f"st.async.shared::cluster.mbarrier::complete_tx::bytes{vector}.f32 [{{$r0}}], {source}, "
        f"[{{$r{count + 1}}}];",
        read_only_args=[target.data_ptr().toint(Int32), *values, barrier.data_ptr().toint(Int32)],
    )
