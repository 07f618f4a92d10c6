"""The scoring kernel of sm_100: contiguous or paged keys, any number of queries and heads.

Epilogue warps, of which the first also holds the tensor memory, then one warp that issues MMAs, one
that loads data, and, where keys have scales, two that load those.

    loads   --full-->    MMA  --ready-->    epilogue
    scales  --scaled-->       <--drained--
            <--empty--

Each arrow is an mbarrier per stage of the ring, or per accumulator; see ``Barriers``.
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

from nvfp4_kernels.indexer.sm100.barriers import initialise, new_barriers
from nvfp4_kernels.indexer.sm100.consumer import Consumer
from nvfp4_kernels.indexer.sm100.epilogue import Epilogue
from nvfp4_kernels.indexer.sm100.loader import Loader, Operands
from nvfp4_kernels.indexer.sm100.logits import LogitRows
from nvfp4_kernels.indexer.sm100.mma import Multiplier, Shared
from nvfp4_kernels.indexer.sm100.operands import Pages, key_map, query_map
from nvfp4_kernels.indexer.sm100.scales import ScaleLoader
from nvfp4_kernels.indexer.sm100.scheduler import Ranges, Sizes, work_of
from nvfp4_kernels.indexer.sm100.tile import (
    EPILOGUE_REGISTERS,
    OTHER_REGISTERS,
    ScoreTile,
)
from nvfp4_kernels.indexer.sm100.variant import Variant
from nvfp4_kernels.indexer.sm100.weights import Weights


@dataclass(frozen=True)
class ScorerSm100:
    """One compiled variant. One with another consumer of scores inherits from it."""

    tile: ScoreTile
    variant: Variant

    @property
    def consumer(self) -> Consumer:
        """See ``consumer.py``."""
        return LogitRows(self.tile, self.variant)

    def signature(self) -> tuple[Any, ...]:
        """Arguments of ``__call__``, see there."""

        def pointer(dtype: type[cutlass.Numeric], align: int) -> Any:
            return make_ptr(dtype, 16, cute.AddressSpace.gmem, assumed_align=align)

        operands = [pointer(Uint8, 16)] * 4
        factors = [pointer(Float32, 16)] * 2
        return (
            *operands, *factors, *[pointer(Int32, 4)] * 3, pointer(Float32, 4),
            Int64(0), *[Int32(0)] * 6,
        )  # fmt: skip

    @cute.jit
    def __call__(
        self,
        q: cute.Pointer,
        q_scales: cute.Pointer,
        k: cute.Pointer,
        k_scales: cute.Pointer,
        weights: cute.Pointer,
        query_factors: cute.Pointer,
        begins: cute.Pointer,
        ends: cute.Pointer,
        table: cute.Pointer,
        out: cute.Pointer,
        page_stride: Int64,
        pages: Int32,
        table_stride: Int32,
        sequences: Int32,
        queries: Int32,
        columns: Int32,
        splits: Int32,
        stream: cuda_driver.CUstream,
    ) -> None:
        """Pointers are null where the variant has none.

        ``q`` are bytes [sequences · queries, heads, row], ``k`` those of the first page, pages
        being ``page_stride`` bytes apart, ``q_scales`` and ``k_scales`` their block scales; FP8
        keys have float32 ``k_scales``, its queries ``query_factors``. ``weights`` and
        ``query_factors`` are float32 [sequences · queries, heads], ``begins``, ``ends`` and
        ``table`` as in ``Ranges`` and ``Pages``, ``out`` float32 [sequences · queries, columns].
        """
        pages_of = Pages(table, table_stride, pages, page_stride, k_scales)
        weights_of = Weights(weights, query_factors)
        sizes = Sizes(sequences, queries, columns, splits, self.consumer.least(out))
        self.start(q, q_scales, k, pages_of, weights_of, Ranges(begins, ends), out, sizes, stream)

    @cute.jit
    def start(
        self,
        q: cute.Pointer,
        q_scales: cute.Pointer,
        k: cute.Pointer,
        pages: Pages,
        weights: Weights,
        ranges: Ranges,
        out: Any,
        sizes: Sizes,
        stream: cuda_driver.CUstream,
    ) -> None:
        """Launches; ``out`` is the consumer's."""
        tile = self.tile
        blocks = cute.ceil_div(sizes.queries, tile.queries)
        self.kernel(
            query_map(tile, q, sizes.sequences * sizes.queries),
            key_map(tile, self.variant, k, sizes.columns, pages.count, pages.stride),
            q_scales,
            pages,
            weights,
            ranges,
            out,
            sizes,
        ).launch(
            grid=(sizes.sequences * blocks * sizes.splits, 1, 1),
            block=(tile.threads, 1, 1),
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=1,  # without which ptxas ignores setmaxnreg
        )

    @cute.kernel
    def kernel(
        self,
        queries_map: GridConstant[TensorMap],
        keys_map: GridConstant[TensorMap],
        q_scales: cute.Pointer,
        pages: Pages,
        weights: Weights,
        ranges: Ranges,
        out: Any,
        sizes: Sizes,
    ) -> None:
        """Sets up, runs one role per warp, takes down."""
        tile, variant = self.tile, self.variant
        barriers = new_barriers(tile)
        shared, memory = self._shared(), self.consumer.memory()
        tensor = Array(Int32, 1, space=AddressSpace.smem, alignment=8)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            ptx.tcgen05_alloc(tensor, tile.tensor_columns)
            ptx.tcgen05_relinquish_alloc_permit()
        if warp == tile.mma_warp and ptx.elect_sync():
            initialise(tile, barriers)
        ptx.barrier_cta_sync()
        # Ranges, and everything else, may be what the kernel before this one has written.
        ptx.griddepcontrol(ptx.GridDepAction.WAIT)
        work = work_of(tile, variant, sizes, ranges)
        if warp < tile.epilogue_warps:
            if cutlass.const_expr(tile.moves_registers):
                ptx.setmaxregister(EPILOGUE_REGISTERS, ptx.SetMaxRegisterAction.INCREASE)
            epilogue = Epilogue(tile, variant, self.consumer)
            place = epilogue.place(warp)
            factors = shared.key_atoms
            columns = tensor.load()
            epilogue.run(weights, ranges, factors, out, memory, barriers, columns, work, place)
        else:
            if cutlass.const_expr(tile.moves_registers):
                ptx.setmaxregister(OTHER_REGISTERS, ptx.SetMaxRegisterAction.DECREASE)
            if warp == tile.mma_warp:
                Multiplier(tile).run(shared, barriers, tensor.load(), work)
            if warp == tile.load_warp:
                operands = Operands(queries_map, keys_map, shared.queries, shared.keys)
                Loader(tile, variant).run(operands, pages, barriers, work)
            if cutlass.const_expr(tile.scaled):
                if warp >= tile.scale_warp:
                    loader = ScaleLoader(tile, variant)
                    atoms = shared.query_atoms, shared.key_atoms
                    number = warp - tile.scale_warp
                    loader.run(q_scales, pages, *atoms, barriers, work, number)
        ptx.barrier_cta_sync()
        if warp == 0:
            ptx.tcgen05_fence(ptx.Tcgen05Fence.AFTER_THREAD_SYNC)
            held = ptx.make_tmem_ptr(tensor.load(), Float32)
            ptx.tcgen05_dealloc(held, tile.tensor_columns)

    def _shared(self) -> Shared:
        tile = self.tile
        queries, keys = self._bytes(tile.query_bytes), self._bytes(tile.stages * tile.key_bytes)
        query_atoms = self._bytes(tile.query_scale_bytes, 128) if tile.block_scaled else None
        key_atoms = self._bytes(tile.stages * tile.key_scale_bytes, 128) if tile.scaled else None
        return Shared(queries, keys, query_atoms, key_atoms)

    def _bytes(self, count: int, alignment: int = 1024) -> Array:
        return Array(Uint8, count, space=AddressSpace.smem, alignment=alignment)
