"""The MMA warp: S = Q·Kᵀ and O += P·V, issued by one of its threads."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Int32, Int64
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.attention.sm100.barriers import Barriers, wait_for_weights
from nvfp4_kernels.attention.sm100.operands import across_rows, along_rows, operand_type
from nvfp4_kernels.attention.sm100.scheduler import Work
from nvfp4_kernels.attention.sm100.tile import (
    KEYS,
    ROWS,
    AttentionTile,
    Variant,
)
from nvfp4_kernels.device.mbarrier import wait
from nvfp4_kernels.sm100.limits import MMA_BYTES
from nvfp4_kernels.sm100.tensor_memory import tensor_pointer

A_COLUMNS = 8  # of tensor memory that one MMA reads of P: 32 bytes of K


@dataclass(frozen=True)
class Operands:
    """Descriptors of queries, and of the ring's first stage read as keys and as values."""

    queries: Int64
    keys: Int64
    values: Int64


@dataclass(frozen=True)
class Multiplier:
    """Role of one warp, which goes round as a whole.

    ptxas of CUDA 13.0 crashes on MMAs in a loop of one thread. With ``early`` tiles, QK of the next
    key tile goes before PV of this one, so that it runs under the softmax; otherwise S may only be
    overwritten once PV has read P from its columns.
    """

    tile: AttentionTile
    variant: Variant

    @cute.jit
    def run(
        self, queries: Array, ring: Array, barriers: Barriers, tensor: Int32, work: Work
    ) -> None:
        tile = self.tile
        leader = ptx.elect_sync()  # the same lane throughout: commits track a thread's own work
        operands = Operands(
            along_rows(tile, queries), along_rows(tile, ring), across_rows(tile, ring)
        )
        tiles = work.most_tiles()
        count = Int32(0)
        if tiles > 0:
            wait(barriers.full, Int32(0))
            for each in cutlass.range_constexpr(tile.query_tiles):
                wait(barriers.asked.subview(each), Int32(0))
                self._score(operands, barriers, tensor, each, Int32(0), count, work, leader)
            if leader:
                ptx.tcgen05_commit(barriers.empty)
        for index in cutlass.range(tiles, unroll=1):
            # Stages come in the order in which they are first used.
            more = Int32(index + 1 < tiles)
            if cutlass.const_expr(tile.early):
                keys, values = count + 1, count + 1 + more
            else:
                values, keys = count + 1, count + 2
            for each in cutlass.range_constexpr(tile.query_tiles):
                if cutlass.const_expr(tile.early):
                    self._next_scores(operands, barriers, tensor, each, index, keys, work, leader)
                self._add(operands, barriers, tensor, each, index, values, work, leader)
                if cutlass.const_expr(not tile.early):
                    self._next_scores(operands, barriers, tensor, each, index, keys, work, leader)
            if leader:
                ptx.tcgen05_commit(barriers.empty.subview(values % tile.stages))
            count = count + 1 + more

    @cute.jit
    def _next_scores(
        self,
        operands: Operands,
        barriers: Barriers,
        tensor: Int32,
        each: cutlass.Constexpr,
        index: Int32,
        count: Int32,
        work: Work,
        leader: Boolean,
    ) -> None:
        """QK of the key tile after ``index``, if there is one; its last query tile frees it."""
        tile = self.tile
        if index + 1 < work.most_tiles():
            if cutlass.const_expr(each == 0):
                wait(barriers.full.subview(count % tile.stages), count // tile.stages)
            if cutlass.const_expr(tile.own_probabilities):
                if index + 1 < work.tiles[each]:
                    wait(barriers.taken.subview(each), index)
            self._score(operands, barriers, tensor, each, index + 1, count, work, leader)
            if cutlass.const_expr(each == tile.query_tiles - 1):
                if leader:
                    ptx.tcgen05_commit(barriers.empty.subview(count % tile.stages))

    @cute.jit
    def _score(
        self,
        operands: Operands,
        barriers: Barriers,
        tensor: Int32,
        each: cutlass.Constexpr,
        index: Int32,
        count: Int32,
        work: Work,
        leader: Boolean,
    ) -> None:
        """S of one query tile and the ``index``-th key tile, in stage ``count`` of the ring."""
        tile, buffers = self.tile, self.tile.score_buffers
        if index < work.tiles[each]:
            ptx.tcgen05_fence(ptx.Tcgen05Fence.AFTER_THREAD_SYNC)
            if leader:
                buffer = index % buffers
                target = tensor + tile.score_column(each, buffer)
                self._multiply_keys(operands, target, each, count % tile.stages)
                ptx.tcgen05_commit(barriers.scored.subview(each * buffers + buffer))

    @cute.jit
    def _add(
        self,
        operands: Operands,
        barriers: Barriers,
        tensor: Int32,
        each: cutlass.Constexpr,
        index: Int32,
        count: Int32,
        work: Work,
        leader: Boolean,
    ) -> None:
        """O of one query tile, and the values of the ``index``-th key tile."""
        tile = self.tile
        if cutlass.const_expr(each == 0):
            wait(barriers.full.subview(count % tile.stages), count // tile.stages)
        if index < work.tiles[each]:
            wait_for_weights(tile, barriers, each, index)
            if leader:
                buffers = tile.score_buffers
                buffer = index % buffers
                source = tensor + tile.probability_column(each, buffer)
                target = tensor + tile.output_column(each)
                self._multiply_values(operands, source, target, count % tile.stages, index > 0)
                ptx.tcgen05_commit(barriers.added.subview(each * buffers + buffer))

    @property
    def _kind(self) -> ptx.Tcgen05MMAKind:
        return ptx.Tcgen05MMAKind.F8F6F4 if self.tile.fp8 else ptx.Tcgen05MMAKind.F16

    def _instruction(self, columns: int, across: bool) -> Int32:
        dtype = operand_type(self.tile, self.variant)
        return ptx.Tcgen05InstrDesc.build(
            a_dtype=dtype,
            b_dtype=dtype,
            c_dtype=cutlass.Float32,
            m_dim=ROWS,
            n_dim=columns,
            b_major=int(across),
        )

    def _multiply_keys(self, operands: Operands, target: Int32, each: int, stage: Int32) -> None:
        """Along D: 32 bytes of each row at a time."""
        tile = self.tile
        instruction = self._instruction(KEYS, across=False)
        a = operands.queries + each * (tile.query_bytes // 16)
        b = operands.keys + stage * (tile.stage_bytes // 16)
        per_chunk = tile.chunk_bytes // MMA_BYTES
        for step in range(tile.row_bytes // MMA_BYTES):
            offset = step % per_chunk * MMA_BYTES
            chunk = step // per_chunk * tile.chunk_bytes
            ptx.tcgen05_mma(
                self._kind,
                ptx.CTAGroup.CTA_1,
                tensor_pointer(target),
                a + (chunk * ROWS + offset) // 16,
                b + (chunk * KEYS + offset) // 16,
                instruction,
                step > 0,
            )

    def _multiply_values(
        self, operands: Operands, source: Int32, target: Int32, stage: Int32, accumulate: Boolean
    ) -> None:
        """Along the keys: 32 bytes of P at a time."""
        tile = self.tile
        instruction = self._instruction(tile.head_dim, across=True)
        keys = MMA_BYTES // tile.element_bytes
        b = operands.values + stage * (tile.stage_bytes // 16)
        for step in range(KEYS // keys):
            ptx.tcgen05_mma(
                self._kind,
                ptx.CTAGroup.CTA_1,
                tensor_pointer(target),
                tensor_pointer(source + step * A_COLUMNS),
                b + step * (keys * tile.chunk_bytes // 16),
                instruction,
                accumulate if step == 0 else True,
            )
