"""The weight-only GEMM of sm_90: 16-bit activations, NVFP4 weights decoded in registers.

Warpgroups that decode weights, multiply them with the tokens and write the result; one warp that
issues loads.

    loads  --full-->  decode, multiply  -->  epilogue
           <-empty--

Each arrow is an mbarrier per stage; the roles say who arrives.
"""

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda_driver
import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Array, Float32, GridConstant, Int32, Int64, Uint8, Uint32
from cutlass.cute.runtime import make_ptr
from cutlass.experimental import primitives as ptx
from cutlass.experimental.cuda import TensorMap, TensorMapSwizzle, create_tensor_map_tiled

from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.fragments import TILE
from nvfp4_kernels.gemm.arguments import MAX_SHARDS
from nvfp4_kernels.gemm.sm90.epilogue import Epilogue, Factors, Result
from nvfp4_kernels.gemm.sm90.loader import Loader, Ring, Weight, map_of_tokens
from nvfp4_kernels.gemm.sm90.mma import Multiplier
from nvfp4_kernels.gemm.sm90.scheduler import Order, place_of, work_of
from nvfp4_kernels.gemm.sm90.split_k import Split
from nvfp4_kernels.gemm.sm90.tile import (
    DATA_BYTES,
    LOAD_REGISTERS,
    MULTIPLY_REGISTERS,
    SCALE_BYTES,
    Output,
    Tile,
)
from nvfp4_kernels.sm90.limits import ROW_BYTES


@dataclass(frozen=True)
class WeightOnlyGemm:
    """One compiled variant."""

    tile: Tile
    output: Output

    @property
    def stages(self) -> int:
        return self.tile.depth(self.output.shared_bytes(self.tile))

    def signature(self) -> tuple[Any, ...]:
        """Arguments of ``__call__``, see there."""
        bias = TYPES.get(self.output.bias, Float32)
        types = [TYPES[self.output.act], *[Uint8] * 4, TYPES[self.output.dtype], Float32, bias]
        pointers = [make_ptr(t, 16, cute.AddressSpace.gmem, assumed_align=16) for t in types]
        return (*pointers, *[Int32(0)] * (4 + MAX_SHARDS - 1))

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,
        w1: cute.Pointer,
        sfw1: cute.Pointer,
        w2: cute.Pointer,
        sfw2: cute.Pointer,
        out: cute.Pointer,
        alpha: cute.Pointer,
        bias: cute.Pointer,
        m: Int32,
        n: Int32,
        k: Int32,
        sms: Int32,
        end0: Int32,
        end1: Int32,
        end2: Int32,
        end3: Int32,
        end4: Int32,
        end5: Int32,
        end6: Int32,
        stream: cuda_driver.CUstream,
    ) -> None:
        """Launches on ``sms`` SMs at the most.

        Activations ``x`` are [m, k], weights ``w1`` (and of a pair ``w2``) and their scales
        fragments of [n, k], ``out`` is [m, n]. For ``alpha``, ``bias`` and the ends see
        ``Factors``.
        """
        tile = self.tile
        token_map = map_of_tokens(tile, self.output.act, x, m, k)
        out_map = token_map
        if cutlass.const_expr(self.output.boxes):
            out_map = create_tensor_map_tiled(
                out.toint(),
                TYPES[self.output.dtype],
                [n, m],
                [Int64(n // 8)],
                [TILE, self.output.box_tokens(tile)],
                swizzle=TensorMapSwizzle.s128b,
            )
        order = Order(rows=cute.ceil_div(n, tile.rows), tokens=cute.ceil_div(m, tile.tokens))
        clusters = order.rows * order.tokens
        if cutlass.const_expr(tile.parts == 1):
            clusters = cutlass.min(clusters, sms * tile.ctas_per_sm)
        self.kernel(
            token_map, w1, sfw1, w2, sfw2, out_map, out, alpha, bias, m, n, k, order,
            end0, end1, end2, end3, end4, end5, end6,
        ).launch(
            grid=(clusters * tile.split_k, 1, 1),
            block=(tile.threads, 1, 1),
            cluster=(tile.split_k, 1, 1),
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=tile.ctas_per_sm,
            preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        token_map: GridConstant[TensorMap],
        w1: cute.Pointer,
        sfw1: cute.Pointer,
        w2: cute.Pointer,
        sfw2: cute.Pointer,
        out_map: GridConstant[TensorMap],
        out: cute.Pointer,
        alpha: cute.Pointer,
        bias: cute.Pointer,
        m: Int32,
        n: Int32,
        k: Int32,
        order: Order,
        end0: Int32,
        end1: Int32,
        end2: Int32,
        end3: Int32,
        end4: Int32,
        end5: Int32,
        end6: Int32,
    ) -> None:
        """Sets up, then runs one role per warpgroup."""
        tile, output, stages = self.tile, self.output, self.stages
        ring = self._ring()
        scratch = self._scratch()
        loader = Loader(tile, stages)
        multiplier = Multiplier(tile, stages, output.act)
        epilogue = Epilogue(tile, output)
        split = Split(tile)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = warp // 4
        rank = ptx.cluster_ctarank()

        if warp == 0 and ptx.elect_sync():
            for stage in cutlass.range_constexpr(stages):
                ptx.mbarrier_init(ring.full.subview(stage), 1)
                ptx.mbarrier_init(ring.empty.subview(stage), loader.empty_arrivals)
            ptx.fence_mbarrier_init()
        split.start()
        ptx.barrier_cta_sync()

        work = work_of(tile, order, k, rank)
        if group == tile.warpgroups:
            if cutlass.const_expr(tile.hands_over):
                ptx.setmaxregister(LOAD_REGISTERS, ptx.SetMaxRegisterAction.DECREASE)
            if warp == 4 * tile.warpgroups and ptx.elect_sync():
                weights = [Weight(w1, sfw1), Weight(w2, sfw2)][: tile.weights]
                loader.run(token_map, weights, ring, work, n, k)
            split.attend()
        else:
            if cutlass.const_expr(tile.hands_over):
                ptx.setmaxregister(MULTIPLY_REGISTERS, ptx.SetMaxRegisterAction.INCREASE)
            ends = [end0, end1, end2, end3, end4, end5, end6]
            factors = Factors(alpha, ends, bias)
            result = Result(out, out_map, m, n)
            for index in cutlass.range(work.mine, unroll=1):
                place = place_of(work, index)
                sums = multiplier.run(ring, work, index, group)
                epilogue.run(sums, factors, result, scratch, place, work, group)
            epilogue.finish()

    def _ring(self) -> Ring:
        tile, stages = self.tile, self.stages
        tiles = stages * tile.k_tiles
        space = AddressSpace.smem
        return Ring(
            tokens=Array(Uint8, tiles * tile.tokens * ROW_BYTES, space=space, alignment=1024),
            data=Array(Uint32, tiles * tile.operands * DATA_BYTES // 4, space=space, alignment=128),
            scales=Array(
                Uint32, tiles * tile.operands * SCALE_BYTES // 4, space=space, alignment=128
            ),
            full=Array(Int64, stages, space=space, alignment=8),
            empty=Array(Int64, stages, space=space, alignment=8),
        )

    def _scratch(self) -> Array:
        """The epilogue's memory."""
        output = self.output
        dtype = TYPES[output.dtype] if output.boxes else Float32
        count = output.shared_bytes(self.tile) * 8 // dtype.width
        return Array(dtype, count, space=AddressSpace.smem, alignment=1024)
