"""GEMM of sm_90: 16-bit or E4M3 activations, NVFP4 weights decoded in registers.

Warpgroups decode weights, multiply them with the tokens and write the result; one warp issues
loads.

    loads  --full-->  decode, multiply  -->  epilogue
           <-empty--

Each labelled arrow is an mbarrier per stage; the docstring of ``TmaLoader`` lists the arrivals.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda_driver
import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Array, Float32, GridConstant, Int32, Int64, Uint8, Uint32
from cutlass.experimental import primitives as ptx
from cutlass.experimental.cuda import TensorMap

from nvfp4_kernels.device.arguments import example, without_unread
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.gemm.shards import ShardEnds
from nvfp4_kernels.gemm.sm90.epilogue import Epilogue, OutputTensor, map_of_result
from nvfp4_kernels.gemm.sm90.loader import Ring, TmaLoader, Weight, map_of_tokens
from nvfp4_kernels.gemm.sm90.mma import Mma
from nvfp4_kernels.gemm.sm90.scaling import ScalingOperands
from nvfp4_kernels.gemm.sm90.scheduler import RasterOrder, scheduler_state, tile_coord
from nvfp4_kernels.gemm.sm90.split_k import SplitK
from nvfp4_kernels.gemm.sm90.tile import (
    LOAD_REGISTERS,
    MULTIPLY_REGISTERS,
    EpilogueConfig,
    Tile,
)
from nvfp4_kernels.sm90.limits import ROW_BYTES


class GemmArguments(NamedTuple):
    """Arguments of a launch; pointers are to global memory.

    Attributes:
        x: activations [m, k]; k is a multiple of 64 if they are E4M3.
        w1, sfw1: a weight [n, k] in fragments or folded, and its scales.
        w2, sfw2: fragments of a pair's second weight and scales; with a single weight the same as
            ``w1``, ``sfw1``; if grouped, None.
        out: result [m, n]; if E4M3, rows of n bytes, rounded up to a multiple of 64.
        alpha, row_scale, bias, out_scale, shard_ends: see ``ScalingOperands``.
        m, n, k: sizes.
        sms: number of SMs, which bounds the grid unless the tile has several ``parts``.
        groups: if grouped, see ``SchedulerState``; ``w1`` and ``sfw1`` are then stacks of weights,
            gate and up of an expert adjacent, with a factor in ``alpha`` for each weight.
    """

    x: cute.Pointer
    w1: cute.Pointer
    sfw1: cute.Pointer
    w2: cute.Pointer
    sfw2: cute.Pointer
    out: cute.Pointer
    alpha: cute.Pointer
    bias: cute.Pointer
    m: Int32
    n: Int32
    k: Int32
    sms: Int32
    shard_ends: ShardEnds
    groups: cute.Pointer = None
    row_scale: cute.Pointer = None
    out_scale: cute.Pointer = None


@dataclass(frozen=True)
class WeightOnlyGemm:
    """One compiled variant of the weight-only GEMM."""

    tile: Tile
    output: EpilogueConfig

    @property
    def stages(self) -> int:
        return self.tile.depth(self.output.shared_bytes(self.tile))

    def signature(self) -> tuple[GemmArguments]:
        """Example arguments of ``__call__``, for ``cute.compile``: one ``GemmArguments``."""
        act, out = TYPES[self.output.act], TYPES[self.output.dtype]
        weights: dict[str, Any] = dict.fromkeys(("w1", "sfw1", "w2", "sfw2"), Uint8)
        scaling: dict[str, Any] = dict.fromkeys(("alpha", "row_scale", "out_scale"), Float32)
        scaling["bias"] = TYPES.get(self.output.bias, Float32)
        types = {"x": act, "out": out, **weights, **scaling, "groups": Int32}
        return (example(GemmArguments, types),)

    @property
    def unread(self) -> list[str]:
        """Names of arguments that device code does not use, or uses only through tensor maps."""
        output = self.output
        return [
            *("x", "sms"),
            *(("w2", "sfw2") if self.tile.weights == 1 or self.tile.grouped else ()),
            *(("groups",) if not self.tile.grouped else ()),
            *(("out",) if output.boxes else ()),
            *(("row_scale",) if not output.per_token else ()),
            *(("bias",) if not output.bias else ()),
            *(("out_scale",) if not output.is_fp8 else ()),
            *(("shard_ends",) if output.shards == 1 else ()),
        ]

    @cute.jit
    def __call__(self, arguments: GemmArguments, stream: cuda_driver.CUstream) -> None:
        """Launch a CTA per tile, but at most as many as ``arguments.sms`` SMs hold.

        If the tile has several ``parts``, launch a cluster of ``split_k`` CTAs per tile instead.
        """
        x, m, n, k = arguments.x, arguments.m, arguments.n, arguments.k
        tile = self.tile
        token_map = map_of_tokens(tile, self.output.act, x, m, k)
        out_map = None
        if cutlass.const_expr(self.output.boxes):
            out_map = map_of_result(tile, self.output, arguments.out, m, n)
        raster = RasterOrder(rows=cute.ceil_div(n, tile.rows), tokens=cute.ceil_div(m, tile.tokens))
        clusters = raster.rows * raster.tokens
        if cutlass.const_expr(tile.parts == 1):
            clusters = cutlass.min(clusters, arguments.sms * tile.ctas_per_sm)
        read = without_unread(arguments, self.unread)
        self.kernel(token_map, out_map, read, raster).launch(
            grid=(clusters * tile.split_k, 1, 1),
            block=(tile.threads, 1, 1),
            cluster=(tile.split_k, 1, 1),
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=tile.ctas_per_sm,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(
        self,
        token_map: GridConstant[TensorMap],
        out_map: GridConstant[TensorMap] | None,
        arguments: GemmArguments,
        raster: RasterOrder,
    ) -> None:
        """Set up barriers, then run one role per warpgroup."""
        tile, output, stages = self.tile, self.output, self.stages
        assert stages >= tile.least_stages, "a ring that would never be released"
        ring = self._ring()
        scratch = self._scratch()
        loader = TmaLoader(tile, stages)
        mma = Mma(tile, stages, output.act)
        epilogue = Epilogue(tile, output)
        split = SplitK(tile)
        received = None
        if cutlass.const_expr(tile.split_k > 1):
            received = Array(Int64, 1, space=AddressSpace.smem, alignment=8)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = warp // 4
        rank = ptx.cluster_ctarank()

        if warp == 0 and ptx.elect_sync():
            for stage in cutlass.range_constexpr(stages):
                ptx.mbarrier_init(ring.full.subview(stage), 1)
                ptx.mbarrier_init(ring.empty.subview(stage), loader.empty_arrivals)
            split.init_barrier(received)
            ptx.fence_mbarrier_init()
        split.start()
        ptx.barrier_cta_sync()

        if cutlass.const_expr(not tile.knows_weights):
            ptx.griddepcontrol(ptx.GridDepAction.WAIT)
        state = scheduler_state(tile, raster, arguments.groups, arguments.k, rank)
        if group == tile.warpgroups:
            if cutlass.const_expr(tile.reallocates_registers):
                ptx.setmaxregister(LOAD_REGISTERS, ptx.SetMaxRegisterAction.DECREASE)
            if warp == 4 * tile.warpgroups and ptx.elect_sync():
                weights = [
                    Weight(arguments.w1, arguments.sfw1),
                    Weight(arguments.w2, arguments.sfw2),
                ][: 1 if tile.grouped else tile.weights]
                loader.run(token_map, weights, ring, state, arguments.n, arguments.k)
            split.wait_start()
        else:
            if cutlass.const_expr(tile.reallocates_registers):
                ptx.setmaxregister(MULTIPLY_REGISTERS, ptx.SetMaxRegisterAction.INCREASE)
            factors = ScalingOperands(
                arguments.alpha,
                arguments.shard_ends,
                arguments.row_scale,
                arguments.bias,
                arguments.out_scale,
            )
            result = OutputTensor(arguments.out, out_map, arguments.m, arguments.n)
            for index in cutlass.range(state.num_tiles, unroll=1):
                coord = tile_coord(state, index)
                sums = mma.run(ring, state, index, group)
                epilogue.run(sums, factors, result, scratch, received, coord, state, group)
            epilogue.finish()
            if cutlass.const_expr(tile.grouped):
                if state.num_tiles == 0:
                    split.wait_start()

    def _ring(self) -> Ring:
        tile, stages = self.tile, self.stages
        tiles = stages * tile.k_tiles
        space = AddressSpace.smem
        return Ring(
            tokens=Array(Uint8, tiles * tile.tokens * ROW_BYTES, space=space, alignment=1024),
            data=Array(
                Uint32, tiles * tile.operands * tile.data_bytes // 4, space=space, alignment=128
            ),
            scales=Array(
                Uint32, tiles * tile.operands * tile.scale_bytes // 4, space=space, alignment=128
            ),
            full=Array(Int64, stages, space=space, alignment=8),
            empty=Array(Int64, stages, space=space, alignment=8),
        )

    def _scratch(self) -> Array:
        """Allocate the epilogue's shared memory."""
        output = self.output
        dtype = TYPES[output.dtype] if output.boxes else Float32
        count = output.shared_bytes(self.tile) * 8 // dtype.width
        return Array(dtype, count, space=AddressSpace.smem, alignment=1024)
