"""MMA warp: issues every tcgen05 instruction that writes tensor memory."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Int16, Int32, Int64
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.device.mbarrier import wait
from nvfp4_kernels.gemm.sm100.barriers import Barriers, PipelineState
from nvfp4_kernels.gemm.sm100.loader import mask_of_readers
from nvfp4_kernels.gemm.sm100.operands import Operand, data_descriptor
from nvfp4_kernels.gemm.sm100.scheduler import SchedulerState, TileCoord, tile_coord
from nvfp4_kernels.gemm.sm100.tile import ATOMS_K, TILE_BYTES, Tile
from nvfp4_kernels.sm100.descriptors import advance, scale_descriptor
from nvfp4_kernels.sm100.limits import (
    ATOM_BYTES,
    ATOM_COLUMNS,
    ATOM_ROWS,
    CTA_ROWS,
    MMA_K,
    WARP_ROWS,
)
from nvfp4_kernels.sm100.tensor_memory import tensor_pointer


@dataclass(frozen=True)
class Mma:
    """Role of one warp of each tile's first CTA.

    All lanes run the loop, and one lane issues: ptxas of CUDA 13.0 crashes if a single thread loops
    over MMAs.

    The PTX ISA guarantees the order tcgen05.cp → MMA (read after write), but not MMA → tcgen05.cp
    to the same columns (write after read; tcgen05 memory consistency model, pipelined
    instructions). A single set of scale columns relies on the tensor core's pipe to keep this
    order, as does every kernel that reuses scale columns. Two sets do not, see ``_acquire_scales``.
    """

    tile: Tile
    stages: int

    @property
    def group(self) -> ptx.CTAGroup:
        return ptx.CTAGroup.CTA_2 if self.tile.two_cta else ptx.CTAGroup.CTA_1

    @cute.jit
    def run(
        self,
        m_side: list[Operand],
        n_side: list[Operand],
        barriers: Barriers,
        tensor: Int32,
        state: SchedulerState,
    ) -> None:
        tile, stages = self.tile, self.stages
        leader = ptx.elect_sync()  # the same lane throughout: commits track a thread's own work
        readers = mask_of_readers(tile, state)
        both = Int16(0b11 << state.rank) if tile.two_cta else None
        descriptors = [data_descriptor(o.data) for o in m_side + n_side]
        scaled = [operand for operand in m_side + n_side if operand.scales is not None]
        scale_descriptors = [scale_descriptor(operand.scales) for operand in scaled]

        consumer = PipelineState(Int32(0), Int32(0))
        for index in cutlass.range(state.num_tiles, unroll=1):
            coord = tile_coord(tile, state, index)
            accumulator = index % tile.accumulators
            self._acquire_accumulator(barriers.acc_empty, index)
            ptx.tcgen05_fence(ptx.Tcgen05Fence.AFTER_THREAD_SYNC)
            target = tensor + accumulator * tile.accumulator_stride
            for step in cutlass.range(state.k_steps, unroll=1):
                # Ready before the stage is there: the last one's MMAs are waited for.
                here = self._stage(descriptors, self._data_bytes, consumer.index)
                scales_here = self._stage(scale_descriptors, self._scale_bytes, consumer.index)
                wait(barriers.full.subview(consumer.index), consumer.phase)
                scales = self._acquire_scales(barriers.empty, tensor, index * state.k_steps + step)
                if leader:
                    self._copy_scales(scales_here, scales)
                    for part in cutlass.range_constexpr(ATOMS_K):
                        self._multiply(
                            here,
                            part,
                            target,
                            scales,
                            coord,
                            (step > 0) if part == 0 else True,
                        )
                    ptx.tcgen05_commit(
                        barriers.empty.subview(consumer.index),
                        multicast_mask=readers,
                        group=self.group,
                    )
                consumer = consumer.advance(stages)
            if leader:
                ptx.tcgen05_commit(
                    barriers.acc_full.subview(accumulator), multicast_mask=both, group=self.group
                )

    @cute.jit
    def _acquire_accumulator(self, acc_empty: Array, index: Int32) -> None:
        """Wait until no epilogue reads the columns that this tile's MMAs overwrite.

        With overlapping accumulators this means: until the previous tile's epilogue has released
        the shared columns. Epilogues run in order, so that earlier tiles are then done too.
        """
        tile = self.tile
        if cutlass.const_expr(tile.accumulators == 2 and tile.overlap > 0):
            # The previous tile has the other accumulator, for the (index - 1) // 2-th time.
            wait(acc_empty.subview((index + 1) % 2), (index + 1) // 2 - 1)
        else:
            phase = index // tile.accumulators
            wait(acc_empty.subview(index % tile.accumulators), phase - 1)

    @cute.jit
    def _acquire_scales(self, empty: Array, tensor: Int32, count: Int32) -> Int32:
        """First column of K step ``count``'s set of scales; with two sets, wait until it is free.

        A set was last read by the MMAs of two K steps ago, whose commit releases a stage of the
        ring.
        """
        tile, stages = self.tile, self.stages
        column = tensor + tile.scale_column
        if cutlass.const_expr(tile.scale_sets == 2):
            before = count + stages - 2  # a phase ahead, so that it is never negative
            wait(empty.subview(before % stages), before // stages - 1)
            ptx.tcgen05_fence(ptx.Tcgen05Fence.AFTER_THREAD_SYNC)
            column += count % 2 * tile.scale_set_columns
        return column

    def _products(self) -> list[tuple[int, int]]:
        """Pairs of weight and term in MMA order; pairs with the same M-side tile are adjacent."""
        tile = self.tile
        weights, terms = range(tile.weights), range(tile.terms.count)
        if tile.swap_ab:
            return [(weight, term) for weight in weights for term in terms]
        return [(weight, term) for term in terms for weight in weights]

    def _collector(self, use: int) -> ptx.Tcgen05MMACollectorOp | None:
        """Collector hint for the ``use``-th of the MMAs over the same 64 elements of K, or None.

        With ``Tile.collects`` a weight's tile stays in the collector for all terms. The activations
        of gate and up projections do not: a modelled prefill of 2048 tokens gained 0.6 % thereby.
        """
        ops, uses = ptx.Tcgen05MMACollectorOp, self.tile.terms.count
        if uses == 1 or not (self.tile.collects and self.tile.swap_ab):
            return None
        if use % uses == 0:
            return ops.FILL
        return ops.LASTUSE if use % uses == uses - 1 else ops.USE

    @property
    def _data_bytes(self) -> list[int]:
        """Bytes of each operand's tile in one CTA, without scales."""
        tile = self.tile
        return [CTA_ROWS * TILE_BYTES] * tile.m_operands + (
            [tile.b_rows * TILE_BYTES] * tile.n_operands
        )

    @property
    def _scale_bytes(self) -> list[int]:
        """Bytes of scales per stage of each operand that has scales."""
        tile = self.tile
        each = ATOMS_K * ATOM_BYTES
        return [each] * tile.m_operands + [each * tile.atoms_n] * tile.n_scales

    def _stage(self, descriptors: list[Int64], sizes: list[int], stage: Int32) -> list[Int64]:
        """Descriptors of a stage, advanced from the first stage's by ``stage`` times each size."""
        pairs = zip(descriptors, sizes, strict=True)
        return [advance(descriptor, stage * (size // 16)) for descriptor, size in pairs]

    def _copy_scales(self, descriptors: list[Int64], scales: Int32) -> None:
        """Copy scales to tensor memory, replicated for four warps (PTX ISA, tcgen05.cp)."""
        shape, spread = ptx.S2TCopyMode.S2T_32x128b_WARPX4
        column = 0
        for descriptor, size in zip(descriptors, self._scale_bytes, strict=True):
            for atom in range(size // ATOM_BYTES):
                ptx.tcgen05_cp(
                    shape,
                    tensor_pointer(scales + column),
                    advance(descriptor, atom * (ATOM_BYTES // 16)),
                    group=self.group,
                    multicast=spread,
                )
                column += ATOM_COLUMNS

    def _multiply(
        self,
        descriptors: list[Int64],
        part: int,
        target: Int32,
        scales: Int32,
        coord: TileCoord,
        accumulate: object,
    ) -> None:
        """Issue one MMA per weight and term, for 64 elements of K."""
        tile = self.tile
        instruction = ptx.Tcgen05MxOmmaInstrDesc.build(
            a_dtype=cutlass.Float4E2M1FN,
            b_dtype=cutlass.Float4E2M1FN,
            scale_format=0,  # E4M3
            m_dim=tile.rows,
            n_dim=tile.columns,
            sparsity_version=0,
        )
        for use, (weight, term) in enumerate(self._products()):
            m, n = (weight, term) if tile.swap_ab else (term, weight)
            a, b = descriptors[m], descriptors[tile.m_operands + n]
            sfa = ATOM_COLUMNS * (m * ATOMS_K + part)
            tile_n = 0 if tile.terms.packed else n
            atom_n = (tile_n * ATOMS_K + part) * tile.atoms_n
            scale_b = scales + ATOM_COLUMNS * (tile.m_operands * ATOMS_K + atom_n)
            if tile.terms.packed:
                scale_b += term  # 32 rows of an atom to a column
            if tile.columns < ATOM_ROWS:
                # A tile that starts inside of an atom: 32 of its rows to a column.
                scale_b += coord.n * tile.columns % ATOM_ROWS // WARP_ROWS
            ptx.tcgen05_mma_block_scale(
                ptx.MMABlockScaleKind.MXF4NVF4,
                self.group,
                tensor_pointer(target + weight * tile.columns),
                advance(a, part * (MMA_K // 2 // 16)),
                advance(b, part * (MMA_K // 2 // 16)),
                instruction,
                enable_input_d=accumulate if term == 0 else True,
                scale_a=tensor_pointer(scales + sfa),
                scale_b=tensor_pointer(scale_b),
                scale_vec_size=ptx.Tcgen05MMABlockScale.BLOCK16,
                collector_op=self._collector(use),
            )
