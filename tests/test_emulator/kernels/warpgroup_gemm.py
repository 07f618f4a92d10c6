"""D = A · Bᵀ on sm_90: A from registers, B by TMA into a ring that two CTAs of a cluster share.

A warp loads B: each CTA loads half of each tile, for both CTAs. A warpgroup loads its own rows of
A, while the wgmma of the preceding tile run.
"""

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda_driver
import cutlass
import cutlass.cute as cute
import torch
from cutlass import (
    AddressSpace,
    Array,
    BFloat16,
    Float32,
    GridConstant,
    Int16,
    Int32,
    Int64,
    Uint32,
)
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cute.runtime import make_ptr
from cutlass.cutlass_dsl import dsl_user_op
from cutlass.experimental import primitives as ptx
from cutlass.experimental.cuda import TensorMap, TensorMapSwizzle, create_tensor_map_tiled

from nvfp4_kernels.runtime.compile import launch
from tests.devices import KernelDevice

ROWS = 64  # rows of A in a CTA
TILE_K = 64
STAGES = 2
CLUSTER = 2
THREADS = 128 + 32
# 128-byte swizzle, 1024 bytes from 8 rows to the next 8.
_LAYOUT = 1 << 62 | (1024 >> 4) << 32 | 1 << 16


@dsl_user_op
def multiply(
    sums: list[Float32], a: list[Uint32], b: Int64, *, loc: Any = None, ip: Any = None
) -> list[Float32]:
    """Issue D = A · B + D for 16 elements of K, asynchronously."""
    count = len(sums)
    # Registers of D are results, and operands tied to the results.
    names = [f"${i}" for i in range(2 * count + 5)]
    text = (
        "{ .reg .pred adds; setp.eq.u32 adds, 0, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{2 * count}k16.f32.bf16.bf16 "
        f"{{{', '.join(names[:count])}}}, {{{', '.join(names[-5:-1])}}}, {names[-1]}, "
        "adds, 1, 1, 0; }"
    )
    result = llvm.inline_asm(
        ir.Type.parse(f"!llvm.struct<({', '.join(['f32'] * count)})>"),
        [each.ir_value(loc=loc, ip=ip) for each in (*sums, *a, b)],
        text,
        ",".join(["=f"] * count + [str(i) for i in range(count)] + ["r"] * 4 + ["l"]),
        has_side_effects=True,
        loc=loc,
        ip=ip,
    )
    each = Float32.mlir_type
    return [Float32(llvm.extractvalue(each, result, [i], loc=loc, ip=ip)) for i in range(count)]


@dataclass(frozen=True)
class WarpgroupGemm:
    """Kernel for ``nvfp4_kernels.runtime.compile.launch``: A, B in bfloat16, D in float32.

    The shapes are A [m, k], B [n, k], D [m, n]; m is a multiple of 128, k of 64.
    """

    n: int

    def signature(self) -> tuple[Any, ...]:
        types = (BFloat16, BFloat16, Float32)
        pointers = [make_ptr(t, 16, cute.AddressSpace.gmem, assumed_align=16) for t in types]
        return (*pointers, Int32(0), Int32(0))

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,
        b: cute.Pointer,
        d: cute.Pointer,
        m: Int32,
        k: Int32,
        stream: cuda_driver.CUstream,
    ) -> None:
        b_map = create_tensor_map_tiled(
            b.toint(),
            BFloat16,
            [k, Int32(self.n)],
            [Int64(k // 8)],
            [TILE_K, self.n // CLUSTER],
            swizzle=TensorMapSwizzle.s128b,
        )
        self.kernel(a, b_map, d, k).launch(
            grid=(m // ROWS, 1, 1), block=(THREADS, 1, 1), cluster=(CLUSTER, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self, a: cute.Pointer, b_map: GridConstant[TensorMap], d: cute.Pointer, k: Int32
    ) -> None:
        ring = Array(BFloat16, STAGES * self.n * TILE_K, space=AddressSpace.smem, alignment=1024)
        full = Array(Int64, STAGES, space=AddressSpace.smem, alignment=8)
        empty = Array(Int64, STAGES, space=AddressSpace.smem, alignment=8)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0 and ptx.elect_sync():
            for stage in cutlass.range_constexpr(STAGES):
                ptx.mbarrier_init(full.subview(stage), 1)
                ptx.mbarrier_init(empty.subview(stage), 4 * CLUSTER)
            ptx.fence_mbarrier_init()
        self.meet()
        steps = k // TILE_K
        if warp == 4:
            if ptx.elect_sync():
                self.load(b_map, ring, full, empty, steps)
        else:
            self.add_up(a, ring, full, empty, d, warp, steps, k)
        self.meet()

    def meet(self) -> None:
        ptx.barrier_cluster_arrive()
        ptx.barrier_cluster_wait()

    @cute.jit
    def wait(
        self,
        barrier: Array,
        step: Int32,
        scope: ptx.MBarrierScope = ptx.MBarrierScope.CTA,
    ) -> None:
        while not ptx.mbarrier_try_wait_parity(
            barrier.subview(step % STAGES),
            (step // STAGES) & 1,
            order=ptx.MemOrder.ACQUIRE,
            scope=scope,
        ):
            pass

    @cute.jit
    def load(self, b_map: TensorMap, ring: Array, full: Array, empty: Array, steps: Int32) -> None:
        half = self.n // CLUSTER
        first = ptx.cluster_ctarank() * half
        for step in cutlass.range(steps, unroll=1):
            stage = step % STAGES
            if step >= STAGES:
                self.wait(empty, step - STAGES, ptx.MBarrierScope.CLUSTER)
            ptx.mbarrier_arrive_expect_tx(full.subview(stage), 2 * self.n * TILE_K)
            ptx.cp_async_bulk_tensor_shared_cluster_global(
                ring.subview((stage * self.n + first) * TILE_K),
                b_map.get_ptr(),
                [step * TILE_K, first],
                full.subview(stage),
                [],
                multicast_mask=Int16((1 << CLUSTER) - 1),
            )

    @cute.jit
    def add_up(
        self,
        a: cute.Pointer,
        ring: Array,
        full: Array,
        empty: Array,
        d: cute.Pointer,
        warp: Int32,
        steps: Int32,
        k: Int32,
    ) -> None:
        lane = cute.arch.lane_idx()
        row = cute.arch.block_idx()[0] * ROWS + warp * 16 + lane // 4
        rows = Array(cute.recast_ptr(a, dtype=Uint32), shape=(1,))
        sums = [Float32(0.0)] * (self.n // 2)
        for step in cutlass.range(steps, unroll=2):
            words = []
            for part in cutlass.range_constexpr(4):
                at = (row * k + step * TILE_K) // 2 + part * 8 + lane % 4
                words.append([rows.load(at + i // 2 * 4 + i % 2 * 4 * k) for i in range(4)])
            self.wait(full, step)
            address = ring.subview(step % STAGES * (self.n * TILE_K)).data_ptr().toint()
            layout = Int64(address) >> 4 & 0x3FFF | _LAYOUT
            ptx.wgmma_fence_aligned()
            for part in cutlass.range_constexpr(4):
                sums = multiply(sums, words[part], layout + 2 * part)
            ptx.wgmma_commit_group_sync_aligned()
            ptx.wgmma_wait_group_sync_aligned(1)
            if step > 0:
                self.release(empty, step - 1, lane)
        ptx.wgmma_wait_group_sync_aligned(0)
        self.store(sums, Array(d, shape=(1,)), row, lane)

    def store(self, sums: list[Float32], target: Array, row: Int32, lane: Int32) -> None:
        for i, each in enumerate(sums):
            column = i // 4 * 8 + 2 * (lane % 4) + i % 2
            target.store(each, (row + i // 2 % 2 * 8) * self.n + column)

    @cute.jit
    def release(self, empty: Array, step: Int32, lane: Int32) -> None:
        """Release a step, on behalf of this warp, to both CTAs, as each CTA loads half of it."""
        if lane < CLUSTER:
            there = ptx.mapa(empty.subview(step % STAGES), lane)
            ptx.mbarrier_arrive(there, scope=ptx.MemScope.CLUSTER)


def right(n: int, k: int, device: KernelDevice) -> bool:
    """Whether D is exact, for small integers and four CTAs."""
    generator = torch.Generator().manual_seed(0)
    a, b = (
        torch.randint(-4, 5, (rows, k), generator=generator).to(torch.bfloat16)
        for rows in (4 * ROWS, n)
    )
    d = device.output("d", torch.zeros(4 * ROWS, n))
    launch(WarpgroupGemm(n), device.put("a", a), device.put("b", b), d, 4 * ROWS, k)
    return torch.equal(d.cpu(), a.float() @ b.float().T)
