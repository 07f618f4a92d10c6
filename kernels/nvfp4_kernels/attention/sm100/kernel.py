"""Attention kernel of sm_100: dense, ragged, paged or listed keys, for prefill and decode."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda_driver
import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Array, Boolean, Float32, GridConstant, Int32, Int64, Uint8
from cutlass.experimental import primitives as ptx
from cutlass.experimental.cuda import TensorMap

from nvfp4_kernels.attention.merge.merge import MergeArguments
from nvfp4_kernels.attention.sm100.barriers import Barriers, allocate_barriers, init_barriers
from nvfp4_kernels.attention.sm100.clc_response import ClcResponse
from nvfp4_kernels.attention.sm100.copied_queries import CopiedQueries
from nvfp4_kernels.attention.sm100.epilogue import AttentionResult, Epilogue
from nvfp4_kernels.attention.sm100.epilogue_warp_split import SYNC_BARRIER, WarpSplitEpilogue
from nvfp4_kernels.attention.sm100.gather_loader import GatherLoader, KeyLists, MapStrides
from nvfp4_kernels.attention.sm100.last_cta import LastCta
from nvfp4_kernels.attention.sm100.loader import Source, TmaLoader
from nvfp4_kernels.attention.sm100.mma import Mma
from nvfp4_kernels.attention.sm100.operands import Strides, operand_type, tensor_maps
from nvfp4_kernels.attention.sm100.queries import Queries, QueryLoader
from nvfp4_kernels.attention.sm100.query_copier import QueryCopier
from nvfp4_kernels.attention.sm100.rotating import RotatingQueryLoader, RotationArguments
from nvfp4_kernels.attention.sm100.scheduler import (
    PersistentOrder,
    PipelineCounts,
    QueryRow,
    SequenceLengths,
    Sizes,
    WorkTile,
    is_static_persistent,
    query_row,
    work_tile,
)
from nvfp4_kernels.attention.sm100.softmax import LogitScaling, Softmax
from nvfp4_kernels.attention.sm100.tile import (
    OTHER_REGISTERS,
    ROWS,
    SOFTMAX_REGISTERS,
    WARPS,
    AttentionTile,
    Variant,
)
from nvfp4_kernels.attention.sm100.work_tile_broadcast import WorkTileBroadcast, work_of
from nvfp4_kernels.device.arguments import example, without_unread
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.sm100.limits import WARP_ROWS

_SCALES = ("scales", "input_scale", "first_row")  # of a result in NVFP4


class AttentionArguments(NamedTuple):
    """Arguments of a launch; pointers that the variant does not use are null.

    Attributes:
        queries: queries, addressed by batch, token and head; if the layout is not dense,
            ``lengths.query_start`` holds the index of each sequence's first token.
        k, v: keys and values, addressed by row of a page, head and page.
        k_strides, v_strides: strides of ``k`` and ``v``; multiples of ``map_stride`` if indexed.
        map_stride: elements between rows of the tensor maps that gathers read.
        map_rows: rows of the tensor maps that gathers read.
        result: outputs, and the sinks.
        lengths: starts and lengths of sequences.
        block_table: int32 [sequences, table_stride], pages.
        table_stride: elements between rows of the block table.
        indices: int32 [tokens, list_stride], positions of listed keys.
        list_stride: elements between lists.
        scale: factor of Q·K.
        soft_cap: soft cap of logits; unused if the variant has none.
        k_scale, v_scale: float32 [], factors that dequantise an E4M3 cache.
        merge: partial results of the splits, and the result into which the last CTA merges them.
        counters: int32 [batch, KV heads], zeros: counts of CTAs that have stored partial results.
        rotation: rotary embedding of queries and new keys.
        sizes: problem sizes, passed by value.
        defective_below: see ``devices.defective_map_bytes``.
    """

    queries: Queries
    k: cute.Pointer
    v: cute.Pointer
    k_strides: Strides
    v_strides: Strides
    map_stride: Int64
    map_rows: Int32
    result: AttentionResult
    lengths: SequenceLengths
    block_table: cute.Pointer
    table_stride: Int32
    indices: cute.Pointer
    list_stride: Int32
    scale: Float32
    soft_cap: Float32
    k_scale: cute.Pointer
    v_scale: cute.Pointer
    merge: MergeArguments
    counters: cute.Pointer
    rotation: RotationArguments
    sizes: Sizes
    defective_below: Int32


@dataclass(frozen=True)
class Memory:
    """Memory that the warps of a CTA share.

    Attributes:
        source: keys and values, and their ring.
        queries: queries of all query tiles.
        copied: rows that query warps copy: separate memory if softmax warps then quantise these
            rows, else ``queries``.
        staged: staged rows of the result: separate memory, or ``queries``.
        barriers: mbarriers with which warps pass tiles.
        tensor: int32, the base address of tensor memory.
        is_last: see ``LastCta.run``.
        clc_response, broadcast: CLC response and work tile broadcast; None without CLC.
    """

    source: Source
    queries: Array
    copied: Array
    staged: Array
    barriers: Barriers
    tensor: Array
    is_last: Array
    clc_response: Any
    broadcast: Any


@dataclass(frozen=True)
class FmhaSm100:
    """Flash attention with tcgen05, warp-specialised: one work tile per CTA, or persistent.

    | warps | role |
    |---|---|
    | 4 per query tile | load or quantise Q, softmax, epilogue; warp 0 allocates tensor memory |
    | 1 | ``Mma``: issues QK and PV |
    | 1 | ``TmaLoader`` or ``GatherLoader``: fills the ring of key and value tiles |
    | 2, with two query tiles | ``QueryCopier``, the first also CLC scheduler: see below |

    Work tiles of few rows have a static persistent scheduler. With two query tiles (``uses_clc``)
    the scheduler is dynamic, through cluster launch control (CLC): the epilogue of a work tile
    overlaps with loads of Q and K and, in 16 bits, QK of the next work tile. The two query warps
    complete a warpgroup for setmaxnreg; the first is also the scheduler warp, which broadcasts work
    tiles through a ``WorkTileBroadcast``.

        load  --kv_full-->   MMA  <--q_full---  softmax
              <--kv_empty--       ---s_full-->
                                  <--s_empty--
                                  <--p_full---
                                  ---o_full-->

    Each arrow is an mbarrier per stage of the ring, or per query tile and stage of S. Arrive counts
    are 4 for ``q_full``, ``s_empty`` and ``p_full``, one per softmax warp, and 1 for the other
    arrows: an arrive.expect_tx or a tcgen05.commit. ``q_full``, too, has a count of 1 if a query
    warp copies the query tile: see ``q_arrivals``. The MMA warp waits for ``s_empty`` only if P and
    S have separate columns.

    With ``Variant.merges``, ``LastCta`` follows the epilogue.
    """

    tile: AttentionTile
    variant: Variant

    def signature(self) -> tuple[AttentionArguments]:
        """Example arguments of ``__call__``, for ``cute.compile``."""
        dtype, keys = TYPES[self.variant.dtype], operand_type(self.tile, self.variant)
        index_tensors = (
            "query_start", "key_start", "seq_lens", "block_table", "indices", "counters"
        )  # fmt: skip
        scalars = {
            **dict.fromkeys(("lse", "lses", "sinks", "k_scale", "v_scale", "input_scale"), Float32),
            **dict.fromkeys(index_tensors, Int32),
        }
        final = Uint8 if self.variant.quantized else dtype
        types = {"q": dtype, "k": keys, "v": keys, "scales": Uint8, **scalars}
        types |= {"result.out": Float32 if self.variant.split else final}
        types |= {"merge.outs": Float32, "merge.out": final}
        types |= dict.fromkeys(("new_k.data", "new_v.data", "table", "q_norm", "k_norm"), dtype)
        types |= {"cache.pages": Uint8 if self.tile.fp8 else dtype, "slots": Int64}
        if self.variant.rotation is not None:
            how = self.variant.rotation.store
            types |= {"table": TYPES[how.table_dtype]}
            types |= dict.fromkeys(("q_norm", "k_norm"), TYPES[how.norm_dtype])
        alignment = (
            {"slots": 8}
            | dict.fromkeys(scalars, 4)
            | ({"result.out": 4} if self.variant.split else {})
        )
        return (example(AttentionArguments, types, alignment),)

    @property
    def unread(self) -> list[str]:
        """Names of arguments that device code does not use, or uses only through tensor maps."""
        variant = self.variant
        return [
            *("k", "v", "k_strides", "v_strides", "map_stride", "map_rows"),
            "defective_below",
            *(("indices", "list_stride") if variant.layout != "indexed" else ()),
            *(("soft_cap",) if not variant.soft_cap else ()),
            *(("sinks",) if not variant.sinks else ()),
            *(("result.sinks",) if variant.split else ()),
            *(("k_scale", "v_scale") if not self.tile.fp8 else ()),
            *(_SCALES if not variant.quantized else ()),
            *((f"result.{name}" for name in _SCALES) if variant.split else ()),
            *(("merge", "counters") if not variant.merges else ()),
            *(("rotation",) if variant.rotation is None else ()),
            "max_resident_ctas",
        ]

    @cute.jit
    def __call__(self, arguments: AttentionArguments, stream: cuda_driver.CUstream) -> None:
        """Launch a CTA per work tile; if static persistent, at most as many as can be resident."""
        tile, variant, sizes = self.tile, self.variant, arguments.sizes
        map_stride, strides = arguments.map_stride, arguments.k_strides
        operands = (arguments.k, strides), (arguments.v, arguments.v_strides)
        query_tiles = cute.ceil_div(sizes.queries * sizes.group, tile.rows)
        map_strides: Any = None  # no parameters of the kernel's
        order: Any = None
        across = sizes.kv_heads * sizes.splits
        grid = (across, sizes.batch, query_tiles)
        if cutlass.const_expr(is_static_persistent(tile, variant)):
            grid = (cutlass.min(across * sizes.batch, sizes.max_resident_ctas), 1, query_tiles)
            order = PersistentOrder(
                cute.FastDivmodDivisorV2(sizes.kv_heads), cute.FastDivmodDivisorV2(sizes.batch)
            )
        view = map_stride, arguments.map_rows, arguments.defective_below
        if cutlass.const_expr(variant.layout == "indexed"):
            # Neighbouring tokens have much the same list: their CTAs find its keys in L2.
            grid = (arguments.result.rows, grid[0], grid[2])
            map_strides = MapStrides(
                page=(strides.page // map_stride).to(Int32),
                head=(strides.head // map_stride).to(Int32),
                row=(strides.row // map_stride).to(Int32),
            )
        self.kernel(
            *tensor_maps(tile, variant, operands, sizes, *view),
            without_unread(arguments, self.unread),
            map_strides,
            order,
        ).launch(
            grid=grid,
            block=(tile.threads, 1, 1),
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=tile.ctas_per_sm,
            preferred_smem_carveout=100,  # percent
        )

    @cute.kernel
    def kernel(
        self,
        k_map: GridConstant[TensorMap],
        v_map: GridConstant[TensorMap],
        arguments: AttentionArguments,
        map_strides: MapStrides,
        order: PersistentOrder,
    ) -> None:
        """Set up while the preceding kernel ends, run each warp's role, free tensor memory."""
        tile, variant = self.tile, self.variant
        barriers = allocate_barriers(tile)
        shared_queries = self._bytes(tile.query_tiles * tile.query_bytes)
        ring = self._bytes(tile.stages * tile.stage_bytes)
        copied, staged = shared_queries, shared_queries
        if cutlass.const_expr(tile.quantizes_copied):
            copied = self._bytes(tile.query_tiles * tile.copied_bytes)
        if cutlass.const_expr(tile.stages_beside):
            staged = self._bytes(tile.query_tiles * tile.staging_bytes)
        tensor = Array(Int32, 1, space=AddressSpace.smem, alignment=8)
        is_last = Array(Int32, 1, space=AddressSpace.smem, alignment=4)
        response: Any = None
        broadcast: Any = None
        if cutlass.const_expr(tile.uses_clc):
            response, broadcast = ClcResponse.allocate(), WorkTileBroadcast.allocate()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        mma_warp = WARPS * tile.query_tiles
        if warp == 0:
            ptx.tcgen05_alloc(tensor, tile.tensor_columns)
            ptx.tcgen05_relinquish_alloc_permit()
        if warp == mma_warp and ptx.elect_sync():
            if cutlass.const_expr(tile.uses_clc):
                response.init()
                broadcast.init(tile.threads // WARP_ROWS - 1)
            init_barriers(tile, barriers)
        if warp == mma_warp + 1 and ptx.elect_sync():
            ptx.prefetch_tensormap(k_map.get_ptr())
            ptx.prefetch_tensormap(v_map.get_ptr())
        table, table_stride = arguments.block_table, arguments.table_stride
        new_keys = arguments.rotation, arguments.k_scale, arguments.v_scale
        memory = Memory(
            Source(k_map, v_map, table, table_stride, ring, *new_keys),
            shared_queries,
            copied,
            staged,
            barriers,
            tensor,
            is_last,
            response,
            broadcast,
        )
        loader: TmaLoader = TmaLoader(tile, variant)
        if cutlass.const_expr(variant.layout == "indexed"):
            lists = KeyLists(
                arguments.indices,
                arguments.list_stride,
                arguments.lengths.query_start,
                arguments.sizes.batch,
                map_strides,
            )
            loader = GatherLoader(tile, variant, lists)
        # The preceding kernel may write any argument, including lengths.
        if cutlass.const_expr(variant.rotation is None) or arguments.rotation.settled == 0:
            ptx.griddepcontrol(ptx.GridDepAction.WAIT)
        sizes, lengths, none = arguments.sizes, arguments.lengths, Int32(0)
        before = PipelineCounts(none, none, none, none, none, none)
        if cutlass.const_expr(tile.uses_clc):
            ptx.barrier_cta_sync()
            if warp < mma_warp:
                ptx.setmaxregister(SOFTMAX_REGISTERS, ptx.SetMaxRegisterAction.INCREASE)
                self._consume(arguments, memory, loader, warp, True)
            else:
                ptx.setmaxregister(OTHER_REGISTERS, ptx.SetMaxRegisterAction.DECREASE)
                if warp == mma_warp + 2:
                    self._schedule(arguments, memory)
                else:
                    self._consume(arguments, memory, loader, warp, False)
        elif cutlass.const_expr(is_static_persistent(tile, variant)):
            total = sizes.kv_heads * sizes.splits * sizes.batch
            first, stride = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
            for number in cutlass.range(first, total, stride, unroll=1):
                before = before.of_one_query_tile()
                work = work_tile(tile, variant, sizes, lengths, order, number, before)
                if number == first:
                    ptx.barrier_cta_sync()
                self._roles(arguments, memory, loader, work, warp)
                before = work.after()
            if warp == mma_warp + 1:
                loader.finish(barriers, before.kv_tiles)
        else:
            index = cute.arch.block_idx()
            work = work_tile(tile, variant, sizes, lengths, None, index, before)
            ptx.barrier_cta_sync()
            self._roles(arguments, memory, loader, work, warp)
            if warp == mma_warp + 1:
                loader.finish(barriers, work.max_tiles())
        ptx.barrier_cta_sync()
        if warp == 0:
            ptx.tcgen05_fence(ptx.Tcgen05Fence.AFTER_THREAD_SYNC)
            allocated = ptx.make_tmem_ptr(tensor.load(), Float32)
            ptx.tcgen05_dealloc(allocated, tile.tensor_columns)

    @cute.jit
    def _schedule(self, arguments: AttentionArguments, memory: Memory) -> None:
        """Role of the scheduler warp: broadcast this CTA's work tile, then those of cancelled CTAs.

        The warp also copies each work tile's first query tile. The next CLC request is issued once
        all other warps have read the current work tile.
        """
        tile, variant, lengths = self.tile, self.variant, arguments.lengths
        response, broadcast = memory.clc_response, memory.broadcast
        x, y, z = cute.arch.block_idx()
        more, phase, none = Boolean(True), Int32(0), Int32(0)
        before = PipelineCounts(none, none, none, none, none, none)
        while more:
            index = x, y, z
            work = work_tile(tile, variant, arguments.sizes, lengths, None, index, before)
            broadcast.write(phase, more, work)
            self._copy_queries(arguments, memory, work, Int32(0))
            before = work.after()
            broadcast.wait_read(phase)
            response.request()
            more, x, y, z = response.take(phase)
            phase += 1
        nothing = work_of([Int32(0)] * 16, tile.query_tiles, arguments.sizes, before)
        broadcast.write(phase, more, nothing)

    @cute.jit
    def _consume(
        self,
        arguments: AttentionArguments,
        memory: Memory,
        loader: TmaLoader,
        warp: Int32,
        is_softmax: cutlass.Constexpr,
    ) -> None:
        """Run the warp's role on the work tiles that the scheduler warp broadcasts."""
        tile, mma_warp = self.tile, WARPS * self.tile.query_tiles
        more, phase, none = Boolean(True), Int32(0), Int32(0)
        before = PipelineCounts(none, none, none, none, none, none)
        while more:
            words = memory.broadcast.read(phase)
            work = work_of(words, tile.query_tiles, arguments.sizes, before)
            more = words[0] != 0
            if work.first_row < work.rows:
                if cutlass.const_expr(is_softmax):
                    self._softmax_role(arguments, memory, work, warp)
                else:
                    self._other_roles(arguments, memory, loader, work, warp)
            before = work.after()
            phase += 1
        if cutlass.const_expr(not is_softmax):
            if warp == mma_warp + 1:
                loader.finish(memory.barriers, before.kv_tiles)

    @cute.jit
    def _roles(
        self,
        arguments: AttentionArguments,
        memory: Memory,
        loader: TmaLoader,
        work: WorkTile,
        warp: Int32,
    ) -> None:
        """Run the warp's role on a work tile."""
        if work.first_row < work.rows:
            if warp < WARPS * self.tile.query_tiles:
                if cutlass.const_expr(self.tile.reallocates_registers):
                    ptx.setmaxregister(SOFTMAX_REGISTERS, ptx.SetMaxRegisterAction.INCREASE)
                self._softmax_role(arguments, memory, work, warp)
            else:
                if cutlass.const_expr(self.tile.reallocates_registers):
                    ptx.setmaxregister(OTHER_REGISTERS, ptx.SetMaxRegisterAction.DECREASE)
                self._other_roles(arguments, memory, loader, work, warp)

    @cute.jit
    def _other_roles(
        self,
        arguments: AttentionArguments,
        memory: Memory,
        loader: TmaLoader,
        work: WorkTile,
        warp: Int32,
    ) -> None:
        """Run the role of a warp other than a softmax warp."""
        tile, variant, mma_warp = self.tile, self.variant, WARPS * self.tile.query_tiles
        if warp == mma_warp:
            ring, tensor = memory.source.ring, memory.tensor.load()
            Mma(tile, variant).run(memory.queries, ring, memory.barriers, tensor, work)
        if warp == mma_warp + 1:
            loader.run(memory.source, memory.barriers, work)
        if cutlass.const_expr(tile.uses_clc):
            if warp == mma_warp + 3:
                self._copy_queries(arguments, memory, work, Int32(1))

    @cute.jit
    def _copy_queries(
        self, arguments: AttentionArguments, memory: Memory, work: WorkTile, query_tile: Int32
    ) -> None:
        """Role of a query warp: copy one query tile of a work tile that has keys."""
        if work.max_tiles() > 0:
            tile = self.tile
            shared = memory.copied.subview(query_tile * ROWS * tile.copied_row_bytes)
            copier = QueryCopier(tile, self.variant)
            copier.run(arguments.queries, shared, memory.barriers, work, query_tile)

    @cute.jit
    def _softmax_role(
        self, arguments: AttentionArguments, memory: Memory, work: WorkTile, warp: Int32
    ) -> None:
        """Role of the softmax warps: load or quantise queries, softmax, epilogue, and merge."""
        tile, variant, barriers = self.tile, self.variant, memory.barriers
        query_tile, tile_warp = warp // WARPS, warp % WARPS
        tiles = work.tiles[0]
        if cutlass.const_expr(tile.query_tiles == 2):
            tiles = cutlass.select_(query_tile == 0, work.tiles[0], work.tiles[1])
        row = query_row(tile, variant, work, query_tile, tile_warp)
        if cutlass.const_expr(variant.rotation is not None):
            ptx.griddepcontrol(ptx.GridDepAction.WAIT)
        shared = memory.queries.subview(query_tile * tile.query_bytes)
        scale, k_scale, v_scale = arguments.scale, Float32(1.0), Float32(1.0)
        if cutlass.const_expr(tile.fp8):  # on their way while the queries are
            k_scale = Array(arguments.k_scale, shape=(1,)).load(0)
            v_scale = Array(arguments.v_scale, shape=(1,)).load(0)
        row_scale = Float32(1.0)
        if cutlass.const_expr(tile.quantizes_copied):
            if work.max_tiles() > 0:
                copied = memory.copied.subview(query_tile * tile.copied_bytes)
                row_scale = CopiedQueries(tile, variant).quantize(
                    copied, shared, barriers, work, query_tile, tile_warp
                )
        elif cutlass.const_expr(not tile.uses_clc):
            row_scale = self._load_queries(arguments, shared, work, row, tile_warp)
        if cutlass.const_expr(not tile.uses_clc or tile.quantizes_copied):
            ptx.bar_warp_sync(cute.arch.FULL_MASK)
            # Without keys the MMA warp does not wait for queries: it would consume later queries'
            # arrivals.
            if ptx.elect_sync() and work.max_tiles() > 0:
                ptx.mbarrier_arrive(barriers.q_full.subview(query_tile))
        if cutlass.const_expr(tile.fp8):
            scale = scale * row_scale * k_scale
        lanes = memory.tensor.load() + ((tile_warp * WARP_ROWS) << 16)
        logits = LogitScaling(scale, arguments.soft_cap)
        state = Softmax(tile, variant).run(
            barriers, lanes, query_tile, tiles, work, row, tile_warp, logits
        )
        epilogue = (WarpSplitEpilogue if tile.warp_split_kv else Epilogue)(tile, variant)
        staged = shared
        if cutlass.const_expr(tile.stages_beside):
            staged = memory.staged.subview(query_tile * tile.staging_bytes)
        epilogue.run(
            arguments.result, staged, barriers, lanes, query_tile, tiles, work, row, tile_warp,
            state, v_scale,
        )  # fmt: skip
        if cutlass.const_expr(tile.uses_clc):
            ptx.bar_warp_sync(cute.arch.FULL_MASK)
            if ptx.elect_sync() and (query_tile == 0) & (tiles > 0):
                ptx.mbarrier_arrive(barriers.stored)
        if cutlass.const_expr(variant.merges):
            LastCta(tile, variant).run(
                arguments.merge, arguments.counters, arguments.sizes, shared, memory.is_last, work,
                tile_warp,
            )  # fmt: skip
        if cutlass.const_expr(is_static_persistent(tile, variant)):
            self._sync()

    def _sync(self) -> None:
        """Barrier over the softmax warps, after which next queries may overwrite shared memory."""
        ptx.barrier_cta_sync(SYNC_BARRIER, thread_count=WARPS * WARP_ROWS)

    def _load_queries(
        self,
        arguments: AttentionArguments,
        shared: Array,
        work: WorkTile,
        row: QueryRow,
        warp: Int32,
    ) -> Float32:
        """Load the warp's queries; see ``QueryLoader.run``."""
        tile, variant, queries = self.tile, self.variant, arguments.queries
        if variant.rotation is None:
            return QueryLoader(tile, variant).run(queries, shared, work, row, warp)
        loader = RotatingQueryLoader(tile, variant, variant.rotation)
        return loader.run(queries, arguments.rotation, shared, work, row, warp)

    def _bytes(self, count: int) -> Array:
        return Array(Uint8, count, space=AddressSpace.smem, alignment=1024)
