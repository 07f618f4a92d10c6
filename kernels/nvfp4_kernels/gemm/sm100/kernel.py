"""Block-scaled GEMM of sm_100: NVFP4 activations times NVFP4 weights."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda_driver
import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Array, Boolean, Float32, GridConstant, Int32, Int64, Uint8
from cutlass.experimental import primitives as ptx
from cutlass.experimental.cuda import TensorMap, TensorMapSwizzle

from nvfp4_kernels.device.arguments import example, without_unread
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.formats.terms import PACKED_ROWS
from nvfp4_kernels.gemm.shards import ShardEnds
from nvfp4_kernels.gemm.sm100.barriers import (
    Barriers,
    init_barriers,
    mbarriers,
    shared_barriers,
)
from nvfp4_kernels.gemm.sm100.epilogue import Epilogue, Scratch
from nvfp4_kernels.gemm.sm100.lifetime import (
    MMA_WARP,
    THREADS,
    TOKENS_WARP,
    WEIGHTS_WARP,
    Lifetime,
)
from nvfp4_kernels.gemm.sm100.loader import TmaLoader
from nvfp4_kernels.gemm.sm100.mma import Mma
from nvfp4_kernels.gemm.sm100.operands import Extent, Operand, data_map, scale_map, shared_operand
from nvfp4_kernels.gemm.sm100.result import OutputTensor
from nvfp4_kernels.gemm.sm100.scaling import ScalingOperands
from nvfp4_kernels.gemm.sm100.scheduler import (
    RasterOrder,
    clusters_across,
    prefetch_tile_count,
    raster_order,
    resolve_tile_count,
    scheduler_state,
)
from nvfp4_kernels.gemm.sm100.split_k import Partials, SplitK
from nvfp4_kernels.gemm.sm100.tile import ATOMS_K, EPILOGUE_WARPS, EpilogueConfig, Tile
from nvfp4_kernels.sm100.limits import CTA_ROWS, WARP_ROWS
from nvfp4_kernels.sm100.tensor_maps import tensor_map

_SWIZZLES = {64: TensorMapSwizzle.s64b, 128: TensorMapSwizzle.s128b}

Maps = tuple[TensorMap, TensorMap]  # of an operand's data and scales


class GemmArguments(NamedTuple):
    """Arguments of a launch; pointers are to global memory.

    A grouped GEMM has at most ``batch`` tiles of ``m`` tokens; with pairs of weights, its ``w1``
    alternates gate and up of each expert.

    Attributes:
        x, sfx: activations, bytes [batch, terms, m, k/2], and blocked scales.
        w1, sfw1: weight, bytes [weight_batch, n, k/2], and blocked scales.
        w2, sfw2: weight and scales of the up projection if ``w1`` is the gate only; with a single
            weight the same as ``w1``, ``sfw1``; if grouped, None.
        out: result [batch, m, n]; if NVFP4, bytes [batch, terms, m, n/2].
        sf_out, out_scale: blocked scales and global scale of an NVFP4 result.
        alpha, row_scale, bias, shard_ends: see ``ScalingOperands``.
        groups: see ``SchedulerState``.
        m, n, k, batch: sizes.
        weight_batch: 1 or ``batch``; if grouped, the number of matrices in ``w1``.
        clusters: maximum number of clusters to launch.
        defective_below: see ``devices.defective_map_bytes``.
    """

    x: cute.Pointer
    sfx: cute.Pointer
    w1: cute.Pointer
    sfw1: cute.Pointer
    w2: cute.Pointer
    sfw2: cute.Pointer
    out: cute.Pointer
    sf_out: cute.Pointer
    out_scale: cute.Pointer
    alpha: cute.Pointer
    row_scale: cute.Pointer
    bias: cute.Pointer
    groups: cute.Pointer
    m: Int32
    n: Int32
    k: Int32
    batch: Int32
    weight_batch: Int32
    clusters: Int32
    defective_below: Int32
    shard_ends: ShardEnds


@dataclass(frozen=True)
class BlockScaledGemm:
    """One compiled variant of the warp-specialised, persistent GEMM.

    | warps | role | pipelines |
    |---|---|---|
    | 0–3 | ``Epilogue``; 0 allocates tensor memory, 3 sets up split-K | consumes accumulators |
    | 4 | ``Mma``, in the first CTA of each tile | consumes operands, produces accumulators |
    | 5 | ``TmaLoader`` of the weights; initialises ``Barriers`` | produces operands |
    | 6 | ``TmaLoader`` of the activations | produces operands |

        TmaLoader  --full-->   Mma  --acc_full-->   Epilogue
                   <--empty--       <--acc_empty--

    ``Barriers`` has the arrive counts. With split-K, epilogue warps of the cluster's CTAs exchange
    partial sums through ``Partials``.
    """

    tile: Tile
    output: EpilogueConfig

    @property
    def stages(self) -> int:
        return self.tile.depth(self.output.shared_bytes(self.tile))

    def signature(self) -> tuple[GemmArguments]:
        """Example arguments of ``__call__``, for ``cute.compile``: one ``GemmArguments``."""
        packed = dict.fromkeys(("x", "sfx", "w1", "sfw1", "w2", "sfw2", "sf_out"), Uint8)
        scaling = dict.fromkeys(("out_scale", "alpha", "row_scale"), Float32)
        out = TYPES.get(self.output.dtype, Uint8)
        bias = TYPES.get(self.output.bias, Float32)
        others = {"out": out, "bias": bias, "groups": Int32}
        return (example(GemmArguments, {**packed, **scaling, **others}),)

    @property
    def unread(self) -> list[str]:
        """Names of arguments that device code does not use, or uses only through tensor maps."""
        output = self.output
        return [
            *("x", "sfx", "w1", "sfw1", "w2", "sfw2", "batch", "clusters", "defective_below"),
            *(("out",) if output.store == "tma" else ()),
            *(("sf_out", "out_scale") if output.dtype != "nvfp4" else ()),
            *(("row_scale",) if not output.row_scale else ()),
            *(("bias",) if not output.bias else ()),
            *(("shard_ends",) if output.shards == 1 else ()),
            "weight_batch" if self.tile.grouped else "groups",
        ]

    @cute.jit
    def __call__(self, arguments: GemmArguments, stream: cuda_driver.CUstream) -> None:
        """Launch at most ``arguments.clusters`` clusters."""
        m, n, k, batch = arguments.m, arguments.n, arguments.k, arguments.batch
        tile = self.tile
        defective = arguments.defective_below
        tokens = token_scales = Extent(m, k, batch * tile.terms.count, defective)
        if cutlass.const_expr(tile.terms.packed):
            token_scales = Extent(PACKED_ROWS * tile.terms.count, k, batch, defective)
        weights = Extent(n, k, arguments.weight_batch, defective)
        x = arguments.x, tokens, arguments.sfx, token_scales
        x_maps = self._maps(*x, n_side=tile.swap_ab)
        w1 = arguments.w1, weights, arguments.sfw1, weights
        w1_maps = self._maps(*w1, n_side=not tile.swap_ab)
        w2_maps = None, None
        if cutlass.const_expr(tile.weights == 2 and not tile.grouped):
            w2 = arguments.w2, weights, arguments.sfw2, weights
            w2_maps = self._maps(*w2, n_side=not tile.swap_ab)
        out_map = None
        if cutlass.const_expr(self.output.store == "tma"):
            out_map = self._out_map(arguments.out, m, n, batch, defective)
        rows_m, rows_n = (n, m) if tile.swap_ab else (m, n)
        across_m = clusters_across(rows_m, tile.rows, tile.cluster_m // tile.ctas)
        across_n = clusters_across(rows_n, tile.columns, tile.cluster_n)
        clusters = cutlass.min(across_m * across_n * batch, arguments.clusters)
        raster = raster_order(across_m, across_n, batch, clusters, tile.grouped)
        read = without_unread(arguments, self.unread)
        self.kernel(*x_maps, *w1_maps, *w2_maps, out_map, read, raster).launch(
            grid=(clusters * tile.cluster, 1, 1),
            block=(THREADS, 1, 1),
            cluster=(tile.cluster, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    def _maps(
        self,
        data: cute.Pointer,
        extent: Extent,
        scales: cute.Pointer,
        scales_extent: Extent,
        n_side: bool,
    ) -> Maps:
        """Tensor maps of an operand and of its scales; a box is one CTA's multicast slice.

        ``n_side``: whether the operand is on the N side.
        """
        tile = self.tile
        rows = tile.b_rows // tile.sharers_b if n_side else CTA_ROWS // tile.cluster_n
        atoms = tile.atoms_n if n_side else 1
        atoms_k = ATOMS_K // (tile.sharers_sfb if n_side else tile.cluster_n)
        return data_map(data, extent, rows), scale_map(scales, scales_extent, atoms, atoms_k)

    def _out_map(
        self, out: cute.Pointer, m: Int32, n: Int32, batch: Int32, defective_below: Int32
    ) -> TensorMap:
        dtype = TYPES[self.output.dtype]
        units = n * (dtype.width // 8) // 16
        return tensor_map(
            out.toint(),
            dtype,
            [n, m, batch],
            [units, Int64(m) * units],
            [self.output.box_columns, WARP_ROWS, 1],
            defective_below,
            _SWIZZLES[self.output.box_bytes],
        )

    @cute.kernel
    def kernel(
        self,
        map_x: GridConstant[TensorMap],
        map_sfx: GridConstant[TensorMap],
        map_w1: GridConstant[TensorMap],
        map_sfw1: GridConstant[TensorMap],
        map_w2: GridConstant[TensorMap] | None,
        map_sfw2: GridConstant[TensorMap] | None,
        map_out: GridConstant[TensorMap] | None,
        arguments: GemmArguments,
        raster: RasterOrder,
    ) -> None:
        """Set up barriers and tensor memory, run one role per warp, and free tensor memory."""
        tile, output, stages = self.tile, self.output, self.stages
        group = ptx.CTAGroup.CTA_2 if tile.two_cta else ptx.CTAGroup.CTA_1
        w1_maps, w2_maps = (map_w1, map_sfw1), (map_w2, map_sfw2)
        m_side, n_side = self._operands(
            [(map_x, map_sfx)] * tile.terms.count,
            [w1_maps, w1_maps if tile.grouped else w2_maps][: tile.weights],
        )
        barriers = shared_barriers(tile, stages)
        tensor = Array(Int32, 1, space=AddressSpace.smem, alignment=8)
        loader, mma = TmaLoader(tile, stages), Mma(tile, stages)
        epilogue = Epilogue(tile, output)
        lifetime = Lifetime(tile)
        warp = cute.arch.warp_idx()
        rank = ptx.cluster_ctarank()
        partials = self._partials()
        state = scheduler_state(
            tile, raster, arguments.k, arguments.weight_batch, arguments.groups, rank
        )
        if warp == WEIGHTS_WARP:
            leader = ptx.elect_sync()  # an answer that takes a while
            if cutlass.const_expr(lifetime.initialiser == WEIGHTS_WARP):
                self._init_barriers(barriers, partials, leader)
            state = prefetch_tile_count(tile, state)
            lifetime.start(WEIGHTS_WARP)
            lifetime.cluster_arrive(WEIGHTS_WARP)
            if leader:
                loader.run_weights(m_side, n_side, barriers, resolve_tile_count(tile, state))
            lifetime.cluster_wait()
            lifetime.arrive_end(warp)
        elif warp == TOKENS_WARP:
            leader = ptx.elect_sync()
            if cutlass.const_expr(lifetime.initialiser == TOKENS_WARP):
                self._init_barriers(barriers, partials, leader)
            state = prefetch_tile_count(tile, state)
            lifetime.start(TOKENS_WARP)
            if cutlass.const_expr(tile.split_k > 1):
                if leader:
                    SplitK(tile).expect_first(partials)
            lifetime.cluster_arrive(TOKENS_WARP)
            if leader:
                loader.run_tokens(m_side, n_side, barriers, resolve_tile_count(tile, state))
            lifetime.cluster_wait()
            lifetime.arrive_end(warp)
        elif warp == MMA_WARP:
            state = prefetch_tile_count(tile, state)
            lifetime.start(None)
            lifetime.cluster_arrive(None)
            lifetime.allocated()
            if rank % tile.ctas == 0:
                mma.run(m_side, n_side, barriers, tensor.load(), resolve_tile_count(tile, state))
            lifetime.cluster_wait()
            lifetime.arrive_end(warp)
        else:
            state = prefetch_tile_count(tile, state)
            lifetime.start(None)
            if warp == 0:
                ptx.tcgen05_alloc(tensor, tile.tensor_columns, group=group)
                ptx.tcgen05_relinquish_alloc_permit(group=group)
            lifetime.allocated()
            lifetime.cluster_arrive(None)
            scaling = ScalingOperands(
                arguments.alpha, arguments.shard_ends, arguments.row_scale, arguments.bias
            )
            result = OutputTensor(
                arguments.out, arguments.sf_out, arguments.out_scale, map_out,
                arguments.m, arguments.n,
            )  # fmt: skip
            scratch = self._scratch(partials, warp)
            state = resolve_tile_count(tile, state)
            lifetime.cluster_wait()
            epilogue.run(scaling, result, scratch, barriers, tensor.load(), state, warp)
            lifetime.arrive_end(warp, reads=True)
            epilogue.drain()

        lifetime.wait_end(warp)
        if warp == 0:
            ptx.tcgen05_fence(ptx.Tcgen05Fence.AFTER_THREAD_SYNC)
            held = ptx.make_tmem_ptr(tensor.load(), Float32)
            ptx.tcgen05_dealloc(held, tile.tensor_columns, group=group)

    @cute.jit
    def _init_barriers(self, barriers: Barriers, partials: Any, leader: Boolean) -> None:
        """Initialise all mbarriers in the ``leader`` of the calling warp."""
        if leader:
            if cutlass.const_expr(self.tile.split_k > 1):
                SplitK(self.tile).init_barriers(partials)
            init_barriers(barriers, self.tile, self.stages)
        ptx.bar_warp_sync(cute.arch.FULL_MASK)

    def _operands(
        self, tokens: list[Maps], weights: list[Maps]
    ) -> tuple[list[Operand], list[Operand]]:
        """Allocate the M side's and the N side's operands in shared memory."""
        tile = self.tile
        m_maps, n_maps = (weights, tokens) if tile.swap_ab else (tokens, weights)
        m_side = [
            shared_operand(maps, self.stages, CTA_ROWS, 1, index)
            for index, maps in enumerate(m_maps)
        ]
        n_side = [
            shared_operand(
                maps,
                self.stages,
                tile.b_rows,
                tile.atoms_n if index < tile.n_scales else 0,
                index,
            )
            for index, maps in enumerate(n_maps)
        ]
        return m_side, n_side

    def _partials(self) -> Any:
        """Allocate ``Partials`` of all epilogue warps in shared memory; None without split-K."""
        tile = self.tile
        if tile.split_k == 1:
            return None
        return Partials(
            sums=self._floats(CTA_ROWS * tile.accumulator_columns),
            partials_full=mbarriers(EPILOGUE_WARPS),
            partials_empty=mbarriers(EPILOGUE_WARPS),
        )

    def _scratch(self, partials: Any, warp: Int32) -> Scratch:
        """Allocate the epilogue's shared memory; return the part of warp ``warp``.

        ``partials``: ``Partials`` of all epilogue warps, or None.
        """
        tile, output = self.tile, self.output
        if partials is not None:
            partials = Partials(
                partials.sums,
                partials.partials_full.subview(warp),
                partials.partials_empty.subview(warp),
            )
        slots = None
        if output.slot_bytes(tile):
            dtype = TYPES.get(output.dtype, Float32)
            each = output.slot_bytes(tile) * 8 // dtype.width
            space = AddressSpace.smem
            slots = Array(dtype, EPILOGUE_WARPS * each, space=space, alignment=1024)
            slots = slots.subview(warp * each)
        length = output.column_vectors(tile) * output.vector_length(tile)
        vectors = None
        if length:
            vectors = self._floats(EPILOGUE_WARPS * length).subview(warp * length)
        return Scratch(slots, vectors, partials)

    def _floats(self, count: int) -> Array:
        return Array(Float32, count, space=AddressSpace.smem, alignment=128)
