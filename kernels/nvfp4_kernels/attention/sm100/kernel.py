"""The attention kernel of sm_100: dense, ragged, paged or listed keys, prefill and decode.

Four softmax warps per query tile, of which the first also holds the tensor memory, one warp that
issues MMAs, one that issues loads.

    loads  --full-->   MMA  <--asked----  softmax
           <--empty--       ---scored-->
                            <--taken----
                            <--weighed--
                            ---added--->

Each arrow is an mbarrier per stage of the ring, or per query tile and buffer of S; see
``Barriers``.
"""

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda_driver
import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Array, Float32, GridConstant, Int32, Int64, Uint8
from cutlass.cute.runtime import make_ptr
from cutlass.experimental import primitives as ptx
from cutlass.experimental.cuda import TensorMap

from nvfp4_kernels.attention.sm100.barriers import Barriers, initialise, new_barriers
from nvfp4_kernels.attention.sm100.epilogue import Epilogue, Result
from nvfp4_kernels.attention.sm100.epilogue_spread import SpreadEpilogue
from nvfp4_kernels.attention.sm100.gather_loader import Gatherer, Lists
from nvfp4_kernels.attention.sm100.loader import Loader, Source
from nvfp4_kernels.attention.sm100.mma import Multiplier
from nvfp4_kernels.attention.sm100.operands import Strides, operand_type, tensor_maps
from nvfp4_kernels.attention.sm100.queries import Queries, QueryLoader
from nvfp4_kernels.attention.sm100.scheduler import Lengths, Sizes, Work, row_of, work_of
from nvfp4_kernels.attention.sm100.softmax import Logits, Softmax
from nvfp4_kernels.attention.sm100.tile import (
    OTHER_REGISTERS,
    SOFTMAX_REGISTERS,
    WARPS,
    AttentionTile,
    Variant,
)
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.sm100.limits import WARP_ROWS


@dataclass(frozen=True)
class Factors:
    """Of logits and values.

    Attributes:
        scale: of Q·K.
        soft_cap: unused without one.
        k_scale, v_scale: float32 []; of an E4M3 cache alone.
    """

    scale: Float32
    soft_cap: Float32
    k_scale: cute.Pointer
    v_scale: cute.Pointer


@dataclass(frozen=True)
class FmhaSm100:
    """One compiled variant."""

    tile: AttentionTile
    variant: Variant

    def signature(self) -> tuple[Any, ...]:
        """Arguments of ``__call__``, see there."""
        dtype = TYPES[self.variant.dtype]
        keys = operand_type(self.tile, self.variant)
        out = Float32 if self.variant.split else dtype
        types = [dtype, keys, keys, out, Float32, Float32, *[Int32] * 5, Float32, Float32]
        aligned = {dtype: 16, keys: 16}
        pointers = [
            make_ptr(t, 16, cute.AddressSpace.gmem, assumed_align=aligned.get(t, 4)) for t in types
        ]
        strides = [Int64(0)] * 10
        return (*pointers, *strides, Float32(0.0), Float32(0.0), *[Int32(0)] * 12)

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        k: cute.Pointer,
        v: cute.Pointer,
        out: cute.Pointer,
        lse: cute.Pointer,
        sinks: cute.Pointer,
        query_start: cute.Pointer,
        key_start: cute.Pointer,
        seq_lens: cute.Pointer,
        block_table: cute.Pointer,
        indices: cute.Pointer,
        k_scale: cute.Pointer,
        v_scale: cute.Pointer,
        q_batch: Int64,
        q_token: Int64,
        q_head: Int64,
        k_row: Int64,
        k_head: Int64,
        k_page: Int64,
        v_row: Int64,
        v_head: Int64,
        v_page: Int64,
        map_step: Int64,
        scale: Float32,
        soft_cap: Float32,
        batch: Int32,
        queries: Int32,
        keys: Int32,
        pages: Int32,
        kv_heads: Int32,
        group: Int32,
        splits: Int32,
        window: Int32,
        table_stride: Int32,
        rows: Int32,
        list_stride: Int32,
        map_rows: Int32,
        stream: cuda_driver.CUstream,
    ) -> None:
        """Pointers are null where the variant has none; strides count elements; see ``Sizes``.

        ``q`` is addressed by batch, token and head, where ``query_start`` gives a sequence's first
        token unless dense; ``k`` and ``v`` by row of a page, head and page. If indexed, all of
        these strides are multiples of ``map_step``, and tensor maps have ``map_rows`` such steps.
        """
        tile, variant = self.tile, self.variant
        sizes = Sizes(
            batch, queries, keys, pages, kv_heads, group, splits, window, table_stride, rows
        )
        k_strides, v_strides = Strides(k_row, k_head, k_page), Strides(v_row, v_head, v_page)
        steps = [(stride // map_step).to(Int32) for stride in (k_page, k_head, k_row)]
        grid = (kv_heads * splits, batch, cute.ceil_div(queries * group, tile.rows))
        if cutlass.const_expr(variant.layout == "indexed"):
            # Neighbours have much the same list: they find its keys in L2.
            grid = (rows, grid[0], grid[2])
        self.kernel(
            *tensor_maps(
                tile, variant, ((k, k_strides), (v, v_strides)), sizes, map_step, map_rows
            ),
            Queries(q, q_batch, q_token, q_head),
            Result(out, lse, sinks, rows, kv_heads * group),
            Lengths(query_start, key_start, seq_lens),
            block_table,
            Lists(indices, list_stride, query_start, batch, *steps),
            Factors(scale, soft_cap, k_scale, v_scale),
            sizes,
        ).launch(
            grid=grid,
            block=(tile.threads, 1, 1),
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=tile.resident,
            preferred_smem_carveout=100,  # percent
        )

    @cute.kernel
    def kernel(
        self,
        k_map: GridConstant[TensorMap],
        v_map: GridConstant[TensorMap],
        queries: Queries,
        result: Result,
        lengths: Lengths,
        table: cute.Pointer,
        lists: Lists,
        factors: Factors,
        sizes: Sizes,
    ) -> None:
        """Sets up, runs one role per warp, takes down; not at all without rows."""
        tile, variant = self.tile, self.variant
        barriers = new_barriers(tile)
        shared_queries = self._bytes(tile.query_tiles * tile.query_bytes)
        ring = self._bytes(tile.stages * tile.stage_bytes)
        tensor = Array(Int32, 1, space=AddressSpace.smem, alignment=8)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        # Lengths, and everything else, may be what the kernel before this one has written.
        ptx.griddepcontrol(ptx.GridDepAction.WAIT)
        work = work_of(tile, variant, sizes, lengths)
        if work.first_row < work.rows:
            mma_warp = WARPS * tile.query_tiles
            if warp == 0:
                ptx.tcgen05_alloc(tensor, tile.tensor_columns)
                ptx.tcgen05_relinquish_alloc_permit()
            if warp == mma_warp and ptx.elect_sync():
                initialise(tile, barriers)
            ptx.barrier_cta_sync()
            if warp < mma_warp:
                if cutlass.const_expr(tile.moves_registers):
                    ptx.setmaxregister(SOFTMAX_REGISTERS, ptx.SetMaxRegisterAction.INCREASE)
                self._rows(
                    queries, result, factors, shared_queries, barriers, tensor.load(), work, warp
                )
            else:
                if cutlass.const_expr(tile.moves_registers):
                    ptx.setmaxregister(OTHER_REGISTERS, ptx.SetMaxRegisterAction.DECREASE)
                if warp == mma_warp:
                    multiplier = Multiplier(tile, variant)
                    multiplier.run(shared_queries, ring, barriers, tensor.load(), work)
                if warp == mma_warp + 1:
                    source = Source(k_map, v_map, table, sizes.table_stride, ring)
                    if cutlass.const_expr(variant.layout == "indexed"):
                        Gatherer(tile, variant, lists).run(source, barriers, work)
                    else:
                        Loader(tile, variant).run(source, barriers, work)
            ptx.barrier_cta_sync()
            if warp == 0:
                ptx.tcgen05_fence(ptx.Tcgen05Fence.AFTER_THREAD_SYNC)
                held = ptx.make_tmem_ptr(tensor.load(), Float32)
                ptx.tcgen05_dealloc(held, tile.tensor_columns)

    @cute.jit
    def _rows(
        self,
        queries: Queries,
        result: Result,
        factors: Factors,
        shared_queries: Array,
        barriers: Barriers,
        tensor: Int32,
        work: Work,
        warp: Int32,
    ) -> None:
        """Role of the softmax warps: their rows' queries, softmax and result."""
        tile, variant = self.tile, self.variant
        query_tile, place = warp // WARPS, warp % WARPS
        tiles = work.tiles[0]
        if cutlass.const_expr(tile.query_tiles == 2):
            tiles = cutlass.select_(query_tile == 0, work.tiles[0], work.tiles[1])
        row = row_of(tile, variant, work, query_tile, place)
        shared = shared_queries.subview(query_tile * tile.query_bytes)
        row_scale = QueryLoader(tile, variant).run(queries, shared, work, row, place)
        ptx.bar_warp_sync(cute.arch.FULL_MASK)
        if ptx.elect_sync():
            ptx.mbarrier_arrive(barriers.asked.subview(query_tile))
        scale, value_scale = factors.scale, Float32(1.0)
        if cutlass.const_expr(tile.fp8):
            scale = scale * row_scale * Array(factors.k_scale, shape=(1,)).load(0)
            value_scale = Array(factors.v_scale, shape=(1,)).load(0)
        lanes = tensor + ((place * WARP_ROWS) << 16)
        sums = Softmax(tile, variant).run(
            barriers, lanes, query_tile, tiles, work, row, place, Logits(scale, factors.soft_cap)
        )
        epilogue = (SpreadEpilogue if tile.spread else Epilogue)(tile, variant)
        epilogue.run(
            result, shared, barriers, lanes, query_tile, tiles, work, row, place, sums, value_scale
        )

    def _bytes(self, count: int) -> Array:
        return Array(Uint8, count, space=AddressSpace.smem, alignment=1024)
