"""Kernel that doubles float32 values through a ring of bulk copies, for sm_90 and sm_100.

One thread loads chunks; all threads double a chunk in place; the same thread stores the chunk. A
slot is filled again only once a bulk store has read the slot.
"""

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda_driver
import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Array, Float32, Int32, Int64
from cutlass.cute.runtime import make_ptr
from cutlass.experimental import primitives as ptx

THREADS = 128
CHUNK = 4 * THREADS  # elements: 16 bytes per thread
SLOTS = 3
CTAS = 2


@dataclass(frozen=True)
class Doubling:
    """Kernel for ``nvfp4_kernels.runtime.compile.launch``: y = 2 x, over a number of chunks."""

    def signature(self) -> tuple[Any, ...]:
        pointer = make_ptr(Float32, 16, cute.AddressSpace.gmem, assumed_align=16)
        return pointer, pointer, Int32(0)

    @cute.jit
    def __call__(
        self, x: cute.Pointer, y: cute.Pointer, chunks: Int32, stream: cuda_driver.CUstream
    ) -> None:
        self.kernel(x, y, chunks).launch(grid=(CTAS, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Pointer, y: cute.Pointer, chunks: Int32) -> None:
        thread = cute.arch.thread_idx()[0]
        first = cute.arch.block_idx()[0]
        mine = cute.ceil_div(chunks - first, CTAS)
        full = Array(Int64, SLOTS, space=AddressSpace.smem, alignment=8)
        ring = Array(Float32, SLOTS * CHUNK, space=AddressSpace.smem, alignment=128)
        source, target = Array(x, shape=(chunks * CHUNK,)), Array(y, shape=(chunks * CHUNK,))
        if thread == 0:
            for slot in cutlass.range_constexpr(SLOTS):
                ptx.mbarrier_init(full.subview(slot), 1)
            ptx.fence_mbarrier_init()
        ptx.barrier_cta_sync()
        for step in cutlass.range(mine, unroll=1):
            slot = step % SLOTS
            here = ring.subview(slot * CHUNK)
            offset = (first + step * CTAS) * CHUNK
            if thread == 0:
                ptx.cp_async_bulk_wait_group(SLOTS - 1, read=True)
                ptx.mbarrier_arrive_expect_tx(full.subview(slot), 4 * CHUNK)
                ptx.cp_async_bulk_shared_cluster_global(
                    here, source.subview(offset), full.subview(slot), 4 * CHUNK
                )
            while not ptx.mbarrier_try_wait_parity(
                full.subview(slot), (step // SLOTS) & 1, order=ptx.MemOrder.ACQUIRE
            ):
                pass
            values = here.load(4 * thread, 4, alignment=16)
            here.store(values + values, 4 * thread, alignment=16)
            ptx.fence_proxy(ptx.Proxy.ASYNC_SHARED, space=ptx.SharedSpace.shared_cta)
            ptx.barrier_cta_sync()
            if thread == 0:
                ptx.cp_async_bulk_global_shared_cta(target.subview(offset), here, 4 * CHUNK)
                ptx.cp_async_bulk_commit_group()
        if thread == 0:
            ptx.cp_async_bulk_wait_group(0, read=True)
