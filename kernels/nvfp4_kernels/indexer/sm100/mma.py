"""MMA warp: keys times queries, one accumulator per key tile."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Int32, Int64
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.device.mbarrier import wait
from nvfp4_kernels.indexer.sm100.barriers import Barriers
from nvfp4_kernels.indexer.sm100.scheduler import TileScheduler
from nvfp4_kernels.indexer.sm100.tile import KEYS, ScoreTile
from nvfp4_kernels.sm100.descriptors import advance, row_descriptor, scale_descriptor
from nvfp4_kernels.sm100.limits import ATOM_BYTES, ATOM_COLUMNS, MMA_BYTES
from nvfp4_kernels.sm100.tensor_memory import tensor_pointer

MMA_SCALES = {"nvfp4": 4, "mxfp4": 2}  # bytes of a word of scales that one MMA takes


@dataclass(frozen=True)
class OperandStorage:
    """Operands in shared memory, where a ring has one entry per stage; absent scales are None.

    Attributes:
        queries: data of the queries.
        keys: ring of key tiles.
        query_atoms: block scales of the queries, [word along D, row atom, 512 bytes].
        key_atoms: ring of key tiles' scales, [word along D, 512 bytes] per stage.
    """

    queries: Array
    keys: Array
    query_atoms: Array | None
    key_atoms: Array | None


@dataclass(frozen=True)
class SmemDescriptors:
    """Descriptors of the arrays in ``OperandStorage``: of a ring's first stage; 0 if absent."""

    queries: Int64
    keys: Int64
    query_atoms: Int64
    key_atoms: Int64


@dataclass(frozen=True)
class Mma:
    """Role of the MMA warp.

    All lanes run the loop and one lane issues, as ptxas of CUDA 13.0 crashes when a single thread
    loops over MMAs. With one set of scales, the copy of a key tile's scales must follow the MMAs
    that read the previous tile's scales; the tensor core's pipe is relied on to keep this order, as
    in the GEMM's ``Mma``.
    """

    tile: ScoreTile

    @cute.jit
    def run(
        self,
        operands: OperandStorage,
        barriers: Barriers,
        tensor: Int32,
        scheduler: TileScheduler,
    ) -> None:
        """Multiply all key tiles of the CTA; ``tensor``: address of the tensor memory."""
        tile = self.tile
        leader = ptx.elect_sync()  # the same lane throughout: commits track a thread's own work
        descriptors = self._descriptors(operands)
        if scheduler.num_tiles > 0:
            wait(barriers.q_full, Int32(0))
            if cutlass.const_expr(tile.block_scaled):
                wait(barriers.sfq_full, Int32(0))
                if leader:
                    column = tensor + tile.query_scale_column
                    self._copy_scales(descriptors.query_atoms, column, tile.query_atoms)
        for index in cutlass.range(scheduler.num_tiles, unroll=1):
            stage, phase = index % tile.stages, index // tile.stages
            accumulator = index % tile.accumulators
            wait(barriers.k_full.subview(stage), phase)
            if cutlass.const_expr(tile.block_scaled):
                wait(barriers.sfk_full.subview(stage), phase)
            key_scales = self._acquire_scales(barriers.k_empty, tensor, index)
            wait(barriers.acc_empty.subview(accumulator), index // tile.accumulators - 1)
            ptx.tcgen05_fence(ptx.Tcgen05Fence.AFTER_THREAD_SYNC)
            if leader:
                if cutlass.const_expr(tile.block_scaled):
                    atoms = advance(descriptors.key_atoms, stage * (tile.key_scale_bytes // 16))
                    self._copy_scales(atoms, key_scales, 1)
                accumulator_column = tensor + accumulator * tile.columns
                for step in cutlass.range_constexpr(tile.steps):
                    self._multiply(descriptors, stage, step, accumulator_column, tensor, key_scales)
                ptx.tcgen05_commit(barriers.k_empty.subview(stage))
                ptx.tcgen05_commit(barriers.acc_full.subview(accumulator))

    @cute.jit
    def _acquire_scales(self, k_empty: Array, tensor: Int32, index: Int32) -> Int32:
        """First column for the scales of key tile ``index``; with two sets, wait for a free set.

        The last readers of the set are the MMAs of tile ``index - 2``; their commit releases the
        tile's stage of the ring.
        """
        tile, stages = self.tile, self.tile.stages
        column = tensor + tile.key_scale_column
        if cutlass.const_expr(tile.block_scaled and tile.scale_sets == 2):
            before = index + stages - 2  # a phase ahead, so that it is never negative
            wait(k_empty.subview(before % stages), before // stages - 1)
            column += index % 2 * tile.scale_set_columns
        return column

    def _descriptors(self, operands: OperandStorage) -> SmemDescriptors:
        """Descriptors of the operands; 0 for absent scales."""
        width = self.tile.chunk_bytes
        rows = row_descriptor(operands.queries, width), row_descriptor(operands.keys, width)
        if operands.query_atoms is None or operands.key_atoms is None:
            return SmemDescriptors(*rows, Int64(0), Int64(0))
        atoms = scale_descriptor(operands.query_atoms), scale_descriptor(operands.key_atoms)
        return SmemDescriptors(*rows, *atoms)

    def _copy_scales(self, atoms: Int64, column: Int32, across: int) -> None:
        """Copy scales to tensor memory, replicated for four warps' lanes (PTX ISA, tcgen05.cp).

        ``across``: number of atoms along the rows.
        """
        shape, spread = ptx.S2TCopyMode.S2T_32x128b_WARPX4
        for atom in range(self.tile.scale_words * across):
            ptx.tcgen05_cp(
                shape,
                tensor_pointer(column + atom * ATOM_COLUMNS),
                advance(atoms, atom * (ATOM_BYTES // 16)),
                multicast=spread,
            )

    def _multiply(
        self,
        descriptors: SmemDescriptors,
        stage: Int32,
        step: int,
        accumulator_column: Int32,
        tensor: Int32,
        key_scales: Int32,
    ) -> None:
        """Issue the MMA of one step along D, 32 bytes of each row."""
        tile = self.tile
        per_chunk = tile.chunk_bytes // MMA_BYTES
        chunk, inside = step // per_chunk * tile.chunk_bytes, step % per_chunk * MMA_BYTES
        first = advance(descriptors.keys, stage * (tile.key_bytes // 16))
        keys = advance(first, (chunk * KEYS + inside) // 16)
        queries = advance(descriptors.queries, (chunk * tile.columns + inside) // 16)
        if tile.block_scaled:
            self._multiply_scaled(keys, queries, step, accumulator_column, tensor, key_scales)
            return
        fp8 = tile.fmt == "fp8"
        dtype = cutlass.Float8E4M3FN if fp8 else cutlass.BFloat16
        instruction = ptx.Tcgen05InstrDesc.build(
            a_dtype=dtype,
            b_dtype=dtype,
            c_dtype=cutlass.Float32,
            m_dim=KEYS,
            n_dim=tile.columns,
        )
        ptx.tcgen05_mma(
            ptx.Tcgen05MMAKind.F8F6F4 if fp8 else ptx.Tcgen05MMAKind.F16,
            ptx.CTAGroup.CTA_1,
            tensor_pointer(accumulator_column),
            keys,
            queries,
            instruction,
            step > 0,
        )

    def _multiply_scaled(
        self,
        keys: Int64,
        queries: Int64,
        step: int,
        accumulator_column: Int32,
        tensor: Int32,
        key_scales: Int32,
    ) -> None:
        """Issue one block-scaled MMA: 64 elements per row, with 4 (nvfp4) or 2 (mxfp4) scales."""
        tile = self.tile
        word, part = divmod(step * MMA_SCALES[tile.fmt], 4)
        nvfp4 = tile.fmt == "nvfp4"
        instruction = ptx.Tcgen05MxOmmaInstrDesc.build(
            a_dtype=cutlass.Float4E2M1FN,
            b_dtype=cutlass.Float4E2M1FN,
            a_sf_id=part,
            b_sf_id=part,
            scale_format=0 if nvfp4 else 1,  # UE4M3, UE8M0
            m_dim=KEYS,
            n_dim=tile.columns,
            sparsity_version=0,
        )
        sizes = ptx.Tcgen05MMABlockScale
        kinds = ptx.MMABlockScaleKind
        ptx.tcgen05_mma_block_scale(
            kinds.MXF4NVF4 if nvfp4 else kinds.MXF4,
            ptx.CTAGroup.CTA_1,
            tensor_pointer(accumulator_column),
            keys,
            queries,
            instruction,
            enable_input_d=step > 0,
            scale_a=tensor_pointer(key_scales + ATOM_COLUMNS * word),
            scale_b=tensor_pointer(
                tensor + tile.query_scale_column + ATOM_COLUMNS * word * tile.query_atoms
            ),
            scale_vec_size=sizes.BLOCK16 if nvfp4 else sizes.BLOCK32,
        )
