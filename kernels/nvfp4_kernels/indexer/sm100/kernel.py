"""Scoring kernel of sm_100: contiguous or paged keys, any number of queries, up to 128 heads."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cuda.bindings.driver as cuda_driver
import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Array, Float32, GridConstant, Int32, Uint8
from cutlass.experimental import primitives as ptx
from cutlass.experimental.cuda import TensorMap

from nvfp4_kernels.device.arguments import example
from nvfp4_kernels.indexer.sm100.barriers import allocate_barriers, initialise
from nvfp4_kernels.indexer.sm100.epilogue import Epilogue
from nvfp4_kernels.indexer.sm100.loader import TmaLoader, TmaOperands
from nvfp4_kernels.indexer.sm100.logits import LogitsVisitor
from nvfp4_kernels.indexer.sm100.mma import Mma, OperandStorage
from nvfp4_kernels.indexer.sm100.operands import PageTable, key_map, query_map
from nvfp4_kernels.indexer.sm100.scales import ScaleLoader
from nvfp4_kernels.indexer.sm100.scheduler import KeyRanges, Sizes, tile_scheduler
from nvfp4_kernels.indexer.sm100.tile import (
    EPILOGUE_REGISTERS,
    OTHER_REGISTERS,
    ScoreTile,
)
from nvfp4_kernels.indexer.sm100.variant import Variant
from nvfp4_kernels.indexer.sm100.visitor import ScoreVisitor
from nvfp4_kernels.indexer.sm100.weights import HeadWeights


class ScoreArguments(NamedTuple):
    """Queries, keys and sizes of a launch, independent of the use of the scores.

    Attributes:
        q: bytes [sequences · queries, num_heads, row bytes].
        k: bytes [keys, row bytes], or the bytes of pages ``page_table.stride`` bytes apart.
        q_scales: block scales of ``q``, or null.
        page_table: addresses of keys' pages and scales.
        weights: weights of the heads.
        ranges: keys that each query sees.
        sizes: problem sizes, passed by value.
        defective_below: see ``devices.defective_map_bytes``.
    """

    q: cute.Pointer
    k: cute.Pointer
    q_scales: cute.Pointer
    page_table: PageTable
    weights: HeadWeights
    ranges: KeyRanges
    sizes: Sizes
    defective_below: Int32


# Element types and, where less than 16 bytes, alignments of the pointers in ``ScoreArguments``.
POINTER_TYPES = {
    **dict.fromkeys(("q", "k", "q_scales", "k_scales"), Uint8),
    **dict.fromkeys(("weights", "query_factors"), Float32),
    **dict.fromkeys(("table", "begins", "ends"), Int32),
}
ALIGNMENTS = dict.fromkeys(("table", "begins", "ends"), 4)


class LogitsArguments(NamedTuple):
    """Arguments of a launch that stores logits.

    Attributes:
        inputs: queries, keys and sizes.
        out: float32 [sequences · queries, keys].
    """

    inputs: ScoreArguments
    out: cute.Pointer


@dataclass(frozen=True)
class IndexerLogitsSm100:
    """One compiled variant of the scoring kernel; base class of kernels with another visitor.

    Warp roles: 4 epilogue warps per group of queries and ping-pong set, the first of which also
    allocates tensor memory; then one MMA warp, one TMA warp and, where keys have scales, two scale
    warps.

        TMA     --q_full, k_full-->     MMA  --acc_full-->   epilogue
        scales  --sfq_full, sfk_full->       <--acc_empty--
                <--------k_empty-------

    The pipelines are rings: ``tile.stages`` key tiles in shared memory (k_full, sfk_full, k_empty)
    and ``tile.accumulators`` accumulators in tensor memory (acc_full, acc_empty); queries are
    loaded once. Where keys are FP8, the epilogue waits for sfk_full and arrives at k_empty too.
    ``barriers.arrive_counts`` has the arrive counts, ``Barriers`` the arriving warps.
    """

    tile: ScoreTile
    variant: Variant

    @property
    def visitor(self) -> ScoreVisitor:
        """Visitor of the scores; see ``visitor.py``."""
        return LogitsVisitor(self.tile, self.variant)

    def signature(self) -> tuple[Any, ...]:
        """Example arguments of ``__call__``, for ``cute.compile``."""
        types, alignments = {**POINTER_TYPES, "out": Float32}, {**ALIGNMENTS, "out": 4}
        return (example(LogitsArguments, types, alignments),)

    @cute.jit
    def __call__(self, arguments: Any, stream: cuda_driver.CUstream) -> None:
        """Launch one CTA per sequence, block of queries and split; unused pointers are null."""
        tile, inputs = self.tile, arguments.inputs
        sizes, defective = inputs.sizes, inputs.defective_below
        blocks = cute.ceil_div(sizes.queries, tile.queries)
        self.kernel(
            query_map(tile, inputs.q, sizes.sequences * sizes.queries, defective),
            key_map(tile, self.variant, inputs.k, sizes.keys, inputs.page_table, defective),
            arguments,
            self.visitor.min_keys(arguments.out),
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
        arguments: Any,
        min_keys: Int32,
    ) -> None:
        """Set up the CTA, run this warp's role, and tear down."""
        tile, variant, inputs = self.tile, self.variant, arguments.inputs
        barriers = allocate_barriers(tile)
        operands, storage = self._operands(), self.visitor.allocate()
        tensor = Array(Int32, 1, space=AddressSpace.smem, alignment=8)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            ptx.tcgen05_alloc(tensor, tile.tensor_columns)
            ptx.tcgen05_relinquish_alloc_permit()
        if warp == tile.mma_warp and ptx.elect_sync():
            initialise(tile, barriers)
        if warp == tile.load_warp and ptx.elect_sync():
            # Parameters, which no kernel writes.
            ptx.prefetch_tensormap(queries_map.get_ptr())
            ptx.prefetch_tensormap(keys_map.get_ptr())
        ptx.barrier_cta_sync()
        # The preceding kernel may write ranges, and all other arguments.
        ptx.griddepcontrol(ptx.GridDepAction.WAIT)
        scheduler = tile_scheduler(tile, variant, inputs.sizes, inputs.ranges, min_keys)
        if warp < tile.epilogue_warps:
            if cutlass.const_expr(tile.moves_registers):
                ptx.setmaxregister(EPILOGUE_REGISTERS, ptx.SetMaxRegisterAction.INCREASE)
            epilogue = Epilogue(tile, variant, self.visitor)
            coord = epilogue.coord(warp)
            columns = tensor.load()
            epilogue.run(
                inputs.weights, inputs.ranges, operands.key_atoms, arguments.out, storage,
                barriers, columns, scheduler, coord,
            )  # fmt: skip
        else:
            if cutlass.const_expr(tile.moves_registers):
                ptx.setmaxregister(OTHER_REGISTERS, ptx.SetMaxRegisterAction.DECREASE)
            if warp == tile.mma_warp:
                Mma(tile).run(operands, barriers, tensor.load(), scheduler)
            if warp == tile.load_warp:
                copied = TmaOperands(queries_map, keys_map, operands.queries, operands.keys)
                TmaLoader(tile, variant).run(copied, inputs.page_table, barriers, scheduler)
            if cutlass.const_expr(tile.scaled):
                if warp >= tile.scale_warp:
                    atoms = operands.query_atoms, operands.key_atoms
                    number = warp - tile.scale_warp
                    ScaleLoader(tile, variant).run(
                        inputs.q_scales, inputs.page_table, *atoms, barriers, scheduler, number
                    )
        ptx.barrier_cta_sync()
        if warp == 0:
            ptx.tcgen05_fence(ptx.Tcgen05Fence.AFTER_THREAD_SYNC)
            held = ptx.make_tmem_ptr(tensor.load(), Float32)
            ptx.tcgen05_dealloc(held, tile.tensor_columns)

    def _operands(self) -> OperandStorage:
        """Allocate shared memory for queries, keys and their scales."""
        tile = self.tile
        queries, keys = self._bytes(tile.query_bytes), self._bytes(tile.stages * tile.key_bytes)
        query_atoms = self._bytes(tile.query_scale_bytes, 128) if tile.block_scaled else None
        key_atoms = self._bytes(tile.stages * tile.key_scale_bytes, 128) if tile.scaled else None
        return OperandStorage(queries, keys, query_atoms, key_atoms)

    def _bytes(self, count: int, alignment: int = 1024) -> Array:
        """Allocate ``count`` bytes of shared memory."""
        return Array(Uint8, count, space=AddressSpace.smem, alignment=alignment)
