"""MMA warp: S = Q·Kᵀ and O += P·V."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Int32, Int64, Uint32
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.attention.sm100.barriers import (
    Barriers,
    part_barrier,
    s_full_barrier,
    wait_p_full,
)
from nvfp4_kernels.attention.sm100.operands import (
    k_major_descriptor,
    mn_major_descriptor,
    operand_type,
)
from nvfp4_kernels.attention.sm100.scheduler import WorkTile
from nvfp4_kernels.attention.sm100.tile import (
    KEYS,
    ROWS,
    AttentionTile,
    Variant,
)
from nvfp4_kernels.device.mbarrier import wait
from nvfp4_kernels.sm100.descriptors import advance
from nvfp4_kernels.sm100.limits import MMA_BYTES
from nvfp4_kernels.sm100.tensor_memory import tensor_pointer

A_COLUMNS = 8  # columns of P in tensor memory per MMA: 32 bytes of its K dimension


@dataclass(frozen=True)
class Descriptors:
    """Shared memory descriptors of the queries, and of the ring's first stage as keys or values."""

    queries: Int64
    keys: Int64
    values: Int64


@dataclass(frozen=True)
class Mma:
    """Role of the MMA warp.

    With ``qk_before_pv``, QK of the next key tile is issued before PV of the current tile, and so
    overlaps with the softmax; otherwise S, or a part of S, may only be overwritten once PV has read
    P from its columns. No barrier enforces this: MMAs are issued in this order, and the tensor
    core's pipe keeps the order, on which every kernel that overlays P on S relies. The PTX ISA
    guarantees the order only for MMAs of the same accumulator and shape (tcgen05 memory consistency
    model, pipelined instructions). All lanes run the loop, and one lane issues MMAs: ptxas of CUDA
    13.0 crashes when a single thread loops over MMAs.
    """

    tile: AttentionTile
    variant: Variant

    @cute.jit
    def run(
        self, queries: Array, ring: Array, barriers: Barriers, tensor: Int32, work: WorkTile
    ) -> None:
        """Issue the MMAs of all key tiles; ``tensor`` is the base address of tensor memory."""
        tile = self.tile
        leader = ptx.elect_sync()  # the same lane throughout: a commit tracks its thread's MMAs
        descriptors = Descriptors(
            queries=k_major_descriptor(tile, queries),
            keys=k_major_descriptor(tile, ring),
            values=mn_major_descriptor(tile, ring),
        )
        tiles = work.max_tiles()
        count = 2 * work.before.kv_tiles  # keys and values
        if tiles > 0:
            wait(barriers.kv_full.subview(self._stage(count)), self._phase(count))
            for each in cutlass.range_constexpr(tile.query_tiles):
                wait(barriers.q_full.subview(each), work.before.work_tiles)
                if cutlass.const_expr(tile.uses_clc and each == 1):
                    # Stagger the softmax groups: the second gets S only after the first has stored
                    # its previous result. In step, both would need the same units at once.
                    if work.tiles[0] > 0:
                        wait(barriers.stored, work.before.first_work_tiles - 1)
                if cutlass.const_expr(tile.separate_p):
                    if work.tiles[each] > 0:
                        self._wait_s_empty(barriers, each, Int32(0), work)
                for part in cutlass.range_constexpr(len(tile.s_parts)):
                    self._issue_qk(
                        descriptors, barriers, tensor, each, part, Int32(0), count, work, leader
                    )
            if leader:
                ptx.tcgen05_commit(barriers.kv_empty.subview(self._stage(count)))
                self._release_queries(barriers, tiles == 1)
        for index in cutlass.range(tiles, unroll=1):
            # The ring holds tiles in the order in which MMAs first read them.
            more = Int32(index + 1 < tiles)
            if cutlass.const_expr(tile.qk_before_pv):
                keys, values = count + 1, count + 1 + more
            else:
                values, keys = count + 1, count + 2
            for part in cutlass.range_constexpr(len(tile.s_parts)):
                for each in cutlass.range_constexpr(tile.query_tiles):
                    if cutlass.const_expr(tile.qk_before_pv):
                        self._issue_next_qk(
                            descriptors, barriers, tensor, each, part, index, keys, work, leader
                        )
                    self._issue_pv(
                        descriptors, barriers, tensor, each, part, index, values, work, leader
                    )
                    if cutlass.const_expr(not tile.qk_before_pv):
                        self._issue_next_qk(
                            descriptors, barriers, tensor, each, part, index, keys, work, leader
                        )
            if leader:
                ptx.tcgen05_commit(barriers.kv_empty.subview(self._stage(values)))
            count = count + 1 + more

    @cute.jit
    def _issue_next_qk(
        self,
        descriptors: Descriptors,
        barriers: Barriers,
        tensor: Int32,
        each: cutlass.Constexpr,
        part: cutlass.Constexpr,
        index: Int32,
        count: Int32,
        work: WorkTile,
        leader: Boolean,
    ) -> None:
        """Issue a part of QK of the next key tile, if any; the last part releases the stage."""
        tile = self.tile
        if index + 1 < work.max_tiles():
            if cutlass.const_expr(each == part == 0):
                wait(barriers.kv_full.subview(self._stage(count)), self._phase(count))
            if cutlass.const_expr(tile.separate_p):
                if index + 1 < work.tiles[each]:
                    self._wait_s_empty(barriers, each, index + 1, work)
            self._issue_qk(
                descriptors, barriers, tensor, each, part, index + 1, count, work, leader
            )
            last = each == tile.query_tiles - 1 and part == len(tile.s_parts) - 1
            if cutlass.const_expr(last):
                if leader:
                    ptx.tcgen05_commit(barriers.kv_empty.subview(self._stage(count)))
                    self._release_queries(barriers, index + 2 == work.max_tiles())

    @cute.jit
    def _release_queries(self, barriers: Barriers, is_last: Boolean) -> None:
        """If the QK just issued is the work tile's last, release the queries when it is done."""
        if cutlass.const_expr(self.tile.uses_clc):
            if is_last:
                ptx.tcgen05_commit(barriers.q_empty)

    def _wait_s_empty(self, barriers: Barriers, each: int, index: Int32, work: WorkTile) -> None:
        """Wait until the softmax has read S of the key tile that precedes the ``index``-th."""
        wait(barriers.s_empty.subview(each), work.kv_tile(each, index) - 1)

    @cute.jit
    def _issue_qk(
        self,
        descriptors: Descriptors,
        barriers: Barriers,
        tensor: Int32,
        each: cutlass.Constexpr,
        part: cutlass.Constexpr,
        index: Int32,
        count: Int32,
        work: WorkTile,
        leader: Boolean,
    ) -> None:
        """Issue a part of QK of a query tile and the ``index``-th key tile.

        The key tile is the ``count``-th tile of the ring.
        """
        tile, stages = self.tile, self.tile.s_stages
        if index < work.tiles[each]:
            ptx.tcgen05_fence(ptx.Tcgen05Fence.AFTER_THREAD_SYNC)
            if leader:
                kv_tile = work.kv_tile(each, index)
                target = tensor + tile.s_column(each, kv_tile % stages)
                self._qk_mmas(descriptors, target, each, part, self._stage(count))
                ptx.tcgen05_commit(s_full_barrier(tile, barriers, each, kv_tile, part))

    @cute.jit
    def _issue_pv(
        self,
        descriptors: Descriptors,
        barriers: Barriers,
        tensor: Int32,
        each: cutlass.Constexpr,
        part: cutlass.Constexpr,
        index: Int32,
        count: Int32,
        work: WorkTile,
        leader: Boolean,
    ) -> None:
        """Issue PV of a query tile and the ``index``-th key tile, for P of part ``part`` of S.

        The values are the ``count``-th tile of the ring.
        """
        tile = self.tile
        if cutlass.const_expr(each == part == 0):
            wait(barriers.kv_full.subview(self._stage(count)), self._phase(count))
        if index < work.tiles[each]:
            kv_tile = work.kv_tile(each, index)
            source = tensor + tile.p_column(each, kv_tile % tile.s_stages)
            target = tensor + tile.o_column(each)
            parts = tile.s_parts[part]
            for p_part in cutlass.range_constexpr(parts[0], parts[-1] + 1):
                wait_p_full(tile, barriers, each, kv_tile, p_part)
                if leader:
                    stage = self._stage(count)
                    self._pv_mmas(descriptors, source, target, stage, p_part, index > 0)
                    ptx.tcgen05_commit(part_barrier(tile, barriers.o_full, each, kv_tile, p_part))

    # Unsigned: a signed remainder takes more instructions of a scheduler that softmax warps share.

    def _stage(self, count: Int32) -> Int32:
        """Stage of the ``count``-th tile of the ring."""
        return (Uint32(count) % self.tile.stages).to(Int32)

    def _phase(self, count: Int32) -> Int32:
        """Phase of ``kv_full`` in which the ``count``-th tile of the ring arrives."""
        return (Uint32(count) // self.tile.stages).to(Int32)

    @property
    def _kind(self) -> ptx.Tcgen05MMAKind:
        return ptx.Tcgen05MMAKind.F8F6F4 if self.tile.fp8 else ptx.Tcgen05MMAKind.F16

    def _instruction(self, columns: int, mn_major_b: bool) -> Int32:
        """Instruction descriptor of an MMA with ``columns`` columns of B."""
        dtype = operand_type(self.tile, self.variant)
        return ptx.Tcgen05InstrDesc.build(
            a_dtype=dtype,
            b_dtype=dtype,
            c_dtype=cutlass.Float32,
            m_dim=ROWS,
            n_dim=columns,
            b_major=int(mn_major_b),
        )

    def _qk_mmas(
        self, descriptors: Descriptors, target: Int32, each: int, part: int, stage: Int32
    ) -> None:
        """Issue the MMAs for a part of S of a query tile, one per 32 bytes of D."""
        tile = self.tile
        parts = tile.s_parts[part]
        first, keys = tile.first_key(parts[0]), sum(tile.part_keys[each] for each in parts)
        instruction = self._instruction(keys, mn_major_b=False)
        a = advance(descriptors.queries, each * (tile.query_bytes // 16))
        b = advance(descriptors.keys, stage * (tile.stage_bytes // 16))
        per_chunk = tile.chunk_bytes // MMA_BYTES
        for step in range(tile.row_bytes // MMA_BYTES):
            offset = step % per_chunk * MMA_BYTES
            chunk = step // per_chunk * tile.chunk_bytes
            ptx.tcgen05_mma(
                self._kind,
                ptx.CTAGroup.CTA_1,
                tensor_pointer(target + first),
                advance(a, (chunk * ROWS + offset) // 16),
                advance(b, (chunk * KEYS + first * tile.chunk_bytes + offset) // 16),
                instruction,
                step > 0,
            )

    def _pv_mmas(
        self,
        descriptors: Descriptors,
        source: Int32,
        target: Int32,
        stage: Int32,
        part: int,
        accumulate: Boolean,
    ) -> None:
        """Issue the MMAs for O of a query tile and a part of the keys, one per 32 bytes of P."""
        tile = self.tile
        instruction = self._instruction(tile.head_dim, mn_major_b=True)
        keys = MMA_BYTES // tile.element_bytes
        b = advance(descriptors.values, stage * (tile.stage_bytes // 16))
        first = tile.first_key(part) // keys
        source = source + tile.p_offset(part)
        for step in range(tile.part_keys[part] // keys):
            ptx.tcgen05_mma(
                self._kind,
                ptx.CTAGroup.CTA_1,
                tensor_pointer(target),
                tensor_pointer(source + step * A_COLUMNS),
                advance(b, (first + step) * (keys * tile.chunk_bytes // 16)),
                instruction,
                accumulate if first + step == 0 else True,
            )
