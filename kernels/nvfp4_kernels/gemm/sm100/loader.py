"""TMA producer warps, which load the operands of every K step of every tile."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Int16, Int32
from cutlass.experimental import primitives as ptx
from cutlass.experimental.cuda import TensorMap

from nvfp4_kernels.device.mbarrier import wait
from nvfp4_kernels.gemm.sm100.barriers import Barriers, PipelineState
from nvfp4_kernels.gemm.sm100.operands import Operand
from nvfp4_kernels.gemm.sm100.scheduler import SchedulerState, TileCoord, tile_coord
from nvfp4_kernels.gemm.sm100.tile import ATOMS_K, TILE_BYTES, Tile
from nvfp4_kernels.sm100.limits import ATOM_BYTES, ATOM_ROWS, CTA_ROWS


@dataclass(frozen=True)
class TmaLoader:
    """Role of one thread in each of two warps, one for the weights and one for the activations.

    No preceding kernel writes weights, so that weights are loaded without waiting for preceding
    kernels; only a grouped GEMM may first wait for the routing. CTAs of a cluster that share an
    operand each load and multicast one slice.
    """

    tile: Tile
    stages: int

    @cute.jit
    def run_weights(
        self,
        m_side: list[Operand],
        n_side: list[Operand],
        barriers: Barriers,
        state: SchedulerState,
    ) -> None:
        """Expect the bytes of all operands, load all weights, then wait until all stages are free.

        Activations may arrive before this thread's arrive.expect_tx: a stage's phase completes only
        after this thread's arrival.
        """
        tile, stages = self.tile, self.stages
        weights = m_side if tile.swap_ab else n_side
        self._load(weights, tile.swap_ab, barriers, state, expects=True)
        # From here on this CTA loads nothing that would compete with the next kernel for bandwidth.
        ptx.griddepcontrol(ptx.GridDepAction.LAUNCH_DEPENDENTS)
        for last in cutlass.range_constexpr(stages):
            count = state.num_tiles * state.k_steps + last
            wait(barriers.empty.subview(count % stages), count // stages - 1)

    @cute.jit
    def run_tokens(
        self,
        m_side: list[Operand],
        n_side: list[Operand],
        barriers: Barriers,
        state: SchedulerState,
    ) -> None:
        """Load all activations, after waiting for the preceding kernel, which may write them."""
        on_m_side = not self.tile.swap_ab
        tokens = m_side if on_m_side else n_side
        # Parameters alone, which no kernel writes; all terms have the same maps.
        ptx.prefetch_tensormap(tokens[0].data_map.get_ptr())
        ptx.prefetch_tensormap(tokens[0].scale_map.get_ptr())
        self._load(tokens, on_m_side, barriers, state, expects=False)

    @cute.jit
    def _load(
        self,
        operands: list[Operand],
        on_m_side: cutlass.Constexpr,
        barriers: Barriers,
        state: SchedulerState,
        expects: cutlass.Constexpr,
    ) -> None:
        """Load ``operands`` of one side for every K step of every tile.

        ``expects``: whether to expect the stage's bytes, of both sides.
        """
        tile, stages = self.tile, self.stages
        load = self._load_m if on_m_side else self._load_n
        producer = PipelineState(Int32(0), Int32(0))
        for index in cutlass.range(state.num_tiles, unroll=1):
            coord = tile_coord(tile, state, index)
            if cutlass.const_expr(not expects and not tile.counts_first):
                if index == 0:  # all work independent of the preceding kernel is done
                    ptx.griddepcontrol(ptx.GridDepAction.WAIT)
            for step in cutlass.range(state.k_steps, unroll=1):
                full = barriers.full.subview(producer.index)
                wait(barriers.empty.subview(producer.index), producer.phase - 1)
                if cutlass.const_expr(expects):
                    if state.rank % tile.ctas == 0:
                        ptx.mbarrier_arrive_expect_tx(full, tile.stage_bytes * tile.ctas)
                for operand in operands:
                    load(operand, coord, state, state.first_k_step + step, producer.index, full)
                producer = producer.advance(stages)

    def _matrix(
        self, operand: Operand, coord: TileCoord, state: SchedulerState, of_weights: bool
    ) -> Int32:
        """Index of an operand's matrix among all weights, or among the terms of the whole batch."""
        if of_weights:
            if self.tile.grouped:
                return coord.weight * self.tile.weights + operand.index
            return coord.weight
        return coord.batch * self.tile.terms.count + operand.index

    def _m_row(self, coord: TileCoord, state: SchedulerState) -> Int32:
        """First row of this CTA's slice of the tile's M side."""
        tile = self.tile
        slice_rows = CTA_ROWS // tile.cluster_n
        slice_row = rank_in_row(tile, state) * slice_rows
        return coord.m * tile.rows + state.rank % tile.ctas * CTA_ROWS + slice_row

    def _n_row(self, coord: TileCoord, state: SchedulerState) -> Int32:
        """First row of this CTA's slice of the tile's N side."""
        tile = self.tile
        slice_row = rank_in_column(tile, state) // tile.ctas * (tile.b_rows // tile.sharers_b)
        return coord.n * tile.columns + state.rank % tile.ctas * tile.b_rows + slice_row

    @cute.jit
    def _load_m(
        self,
        operand: Operand,
        coord: TileCoord,
        state: SchedulerState,
        step: Int32,
        stage: Int32,
        full: Array,
    ) -> None:
        """Load this CTA's slice of an M operand, for all CTAs of the cluster with that operand."""
        tile = self.tile
        mask = mask_of_row(tile, state)
        rank = rank_in_row(tile, state)
        slice_bytes = CTA_ROWS // tile.cluster_n * TILE_BYTES
        data = operand.data.subview(stage * (CTA_ROWS * TILE_BYTES) + rank * slice_bytes)
        row = self._m_row(coord, state)
        batch = self._matrix(operand, coord, state, of_weights=tile.swap_ab)
        self._copy(operand.data_map, [step * TILE_BYTES, row, batch], data, full, mask)
        atoms = ATOMS_K // tile.cluster_n
        scales = operand.scales.subview((stage * ATOMS_K + rank * atoms) * ATOM_BYTES)
        row_atom = coord.m * tile.ctas + state.rank % tile.ctas
        atom = step * ATOMS_K + rank * atoms
        self._copy(operand.scale_map, [0, row_atom, atom, batch], scales, full, mask)

    @cute.jit
    def _load_n(
        self,
        operand: Operand,
        coord: TileCoord,
        state: SchedulerState,
        step: Int32,
        stage: Int32,
        full: Array,
    ) -> None:
        """Load this CTA's slice of an N operand, for all CTAs of the cluster with that operand.

        The two CTAs of a pair hold different rows, but the same scales.
        """
        tile = self.tile
        rank = rank_in_column(tile, state)
        slice_bytes = tile.b_rows // tile.sharers_b * TILE_BYTES
        data_rank = rank // tile.ctas
        data = operand.data.subview(stage * (tile.b_rows * TILE_BYTES) + data_rank * slice_bytes)
        row = self._n_row(coord, state)
        batch = self._matrix(operand, coord, state, of_weights=not tile.swap_ab)
        self._copy(
            operand.data_map,
            [step * TILE_BYTES, row, batch],
            data,
            full,
            mask_of_column(tile, state, same_half=True),
        )
        if cutlass.const_expr(operand.scales is not None):
            self._load_n_scales(operand, coord, state, step, stage, full)

    def _load_n_scales(
        self,
        operand: Operand,
        coord: TileCoord,
        state: SchedulerState,
        step: Int32,
        stage: Int32,
        full: Array,
    ) -> None:
        """Load this CTA's slice of an N operand's scales, or of all terms' if terms share atoms."""
        tile = self.tile
        rank = rank_in_column(tile, state)
        batch = coord.batch
        if not tile.terms.packed:
            batch = self._matrix(operand, coord, state, of_weights=not tile.swap_ab)
        atoms = ATOMS_K // tile.sharers_sfb
        offset = (stage * ATOMS_K + rank * atoms) * (tile.atoms_n * ATOM_BYTES)
        row_atom = coord.n * tile.columns // ATOM_ROWS
        atom = step * ATOMS_K + rank * atoms
        self._copy(
            operand.scale_map,
            [0, row_atom, atom, batch],
            operand.scales.subview(offset),
            full,
            mask_of_column(tile, state, same_half=False),
        )

    def _copy(
        self,
        tensor_map: TensorMap,
        coord: list[Int32],
        target: Array,
        full: Array,
        mask: Int16 | None,
    ) -> None:
        """Issue one copy; with two CTAs per tile, its bytes count on the first CTA's mbarrier."""
        ptx.cp_async_bulk_tensor_shared_cluster_global(
            target,
            tensor_map.get_ptr(),
            coord,
            full,
            [],
            multicast_mask=mask,
            group=ptx.CTAGroup.CTA_2 if self.tile.two_cta else ptx.CTAGroup.CTA_1,
        )


# --- the cluster: rank = place along M + cluster_m · place along N -------------------------------


def rank_in_row(tile: Tile, state: SchedulerState) -> Int32 | int:
    """Rank of this CTA among the CTAs with the same M operand."""
    return state.rank // tile.cluster_m if tile.cluster_n > 1 else 0


def rank_in_column(tile: Tile, state: SchedulerState) -> Int32 | int:
    """Rank of this CTA among the CTAs with the same N operand."""
    return state.rank % tile.cluster_m if tile.cluster_m > 1 else 0


def mask_of_row(tile: Tile, state: SchedulerState) -> Int16 | None:
    """Multicast mask of the CTAs with the same M operand; None if this CTA is the only one."""
    if tile.cluster_n == 1:
        return None
    row = sum(1 << (tile.cluster_m * n) for n in range(tile.cluster_n))
    return Int16(row << (state.rank % tile.cluster_m))


def mask_of_column(tile: Tile, state: SchedulerState, same_half: bool) -> Int16 | None:
    """Multicast mask of the CTAs with the same N operand; None if this CTA is the only one.

    ``same_half``: of each pair of CTAs, only the CTA with the same half of the rows.
    """
    each = tile.ctas if same_half else 1
    if tile.cluster_m == each:
        return None
    column = sum(1 << m for m in range(0, tile.cluster_m, each))
    start = state.rank // tile.cluster_m * tile.cluster_m
    return Int16(column << (start + state.rank % each))


def mask_of_readers(tile: Tile, state: SchedulerState) -> Int16 | None:
    """Multicast mask of MMA commits: the CTAs whose loads this tile's MMAs read; None: this CTA."""
    if tile.split_k > 1 or tile.cluster == 1:
        return None
    row = sum(1 << (tile.cluster_m * n) for n in range(tile.cluster_n)) * ((1 << tile.ctas) - 1)
    column = (1 << tile.cluster_m) - 1
    first = state.rank % tile.cluster_m // tile.ctas * tile.ctas
    return Int16((row << first) | (column << (state.rank // tile.cluster_m * tile.cluster_m)))
