"""Set-up and exit barriers of a CTA."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.gemm.sm100.tile import EPILOGUE_WARPS, Tile

MMA_WARP = EPILOGUE_WARPS
WEIGHTS_WARP = MMA_WARP + 1
TOKENS_WARP = WEIGHTS_WARP + 1
THREADS = 32 * (TOKENS_WARP + 1)

_EPILOGUE_THREADS = 32 * EPILOGUE_WARPS
_START, _ALLOCATED, _END = 1, 2, 3  # named barriers


@dataclass(frozen=True)
class Lifetime:
    """Set-up and exit barriers over the threads of a CTA or its cluster.

    | barrier | threads | guarantee after it |
    |---|---|---|
    | start | CTA; if coupled, cluster | mbarriers are initialised; all CTAs have started |
    | allocated | epilogue and MMA warps | tensor memory's address is in shared memory |
    | cluster | with split-K, cluster | all CTAs have started, ``Partials`` are initialised |
    | end | epilogue warps; if coupled, cluster | no peer signals; tensor memory is unused |

    One thread initialises all mbarriers, before any is used. Without coupled CTAs its warp only
    arrives at start. With split-K the thread is the tokens' loader, as its fence for the cluster
    would delay the first weights. Load warps never wait for tensor memory, which a preceding kernel
    may hold. With split-K, only the epilogue warps wait for peers before their work, and no warp
    waits for peers at the end, see ``SplitK``.
    """

    tile: Tile

    @property
    def initialiser(self) -> int:
        """Warp of which one thread initialises the mbarriers."""
        return TOKENS_WARP if self.tile.split_k > 1 else WEIGHTS_WARP

    @cute.jit
    def start(self, warp: cutlass.Constexpr) -> None:
        """Pass the start barrier; ``warp``: the calling warp if it loads, else None."""
        initialises = warp == self.initialiser
        if cutlass.const_expr(self.tile.coupled):
            ptx.barrier_cluster_arrive_relaxed()
            ptx.barrier_cluster_wait()
        elif cutlass.const_expr(initialises):
            ptx.barrier_cta_arrive(_START, THREADS)
        else:
            ptx.barrier_cta_sync(_START, thread_count=THREADS)

    def allocated(self) -> None:
        """Wait until tensor memory is allocated."""
        ptx.barrier_cta_sync(_ALLOCATED, thread_count=_EPILOGUE_THREADS + 32)

    @cute.jit
    def cluster_arrive(self, warp: cutlass.Constexpr) -> None:
        """Arrive at the split-K cluster barrier; ``warp`` as for ``start``.

        ``fence.mbarrier_init`` orders the same thread's initialisations before a relaxed arrival
        at the cluster barrier (PTX ISA, membar/fence).
        """
        if cutlass.const_expr(self.tile.split_k > 1):
            if cutlass.const_expr(warp == self.initialiser):
                ptx.fence_mbarrier_init()
            ptx.barrier_cluster_arrive_relaxed()

    @cute.jit
    def cluster_wait(self) -> None:
        """Wait at the split-K cluster barrier until all peers have started."""
        if cutlass.const_expr(self.tile.split_k > 1):
            ptx.barrier_cluster_wait()

    @cute.jit
    def arrive_end(self, warp: Int32, reads: cutlass.Constexpr = False) -> None:
        """Arrive at the end barrier: this warp no longer signals peers or reads tensor memory.

        ``reads``: whether the warp has read tensor memory. Other warps have no accesses to order,
        and a release at cluster scope costs a fence of the whole device.
        """
        if cutlass.const_expr(self.tile.coupled and reads):
            ptx.barrier_cluster_arrive()
        elif cutlass.const_expr(self.tile.coupled):
            ptx.barrier_cluster_arrive_relaxed()
        elif warp > 0 and warp < EPILOGUE_WARPS:
            ptx.barrier_cta_arrive(_END, _EPILOGUE_THREADS)

    @cute.jit
    def wait_end(self, warp: Int32) -> None:
        """Wait at the end barrier until this CTA may exit, and warp 0 may free tensor memory."""
        if cutlass.const_expr(self.tile.coupled):
            ptx.barrier_cluster_wait()
        elif warp == 0:
            ptx.barrier_cta_sync(_END, thread_count=_EPILOGUE_THREADS)
