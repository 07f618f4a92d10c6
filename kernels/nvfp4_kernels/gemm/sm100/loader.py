"""The load warp: brings the operands of every step of every tile into shared memory."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Int16, Int32
from cutlass.experimental import primitives as ptx
from cutlass.experimental.cuda import TensorMap

from nvfp4_kernels.device.mbarrier import wait
from nvfp4_kernels.gemm.sm100.operands import Operand
from nvfp4_kernels.gemm.sm100.scheduler import Place, Work, place_of
from nvfp4_kernels.gemm.sm100.tile import ATOMS_K, TILE_BYTES, Tile
from nvfp4_kernels.sm100.limits import ATOM_BYTES, ATOM_ROWS, CTA_ROWS


@dataclass(frozen=True)
class Loader:
    """Role of one thread. CTAs of a cluster that share an operand load a slice of it each.

    | barrier | arrivals | by |
    |---|---|---|
    | ``full[stage]``, in a pair the first CTA's | 1 and its bytes | every copy into the pair |
    | ``empty[stage]`` | tiles that read what this CTA loads | their commits |
    """

    tile: Tile
    stages: int

    @property
    def empty_arrivals(self) -> int:
        """Tiles of the cluster whose MMAs read what one CTA has loaded."""
        tile = self.tile
        return 1 if tile.split_k > 1 else tile.cluster_n + tile.cluster_m // tile.ctas - 1

    @cute.jit
    def run(
        self, m_side: list[Operand], n_side: list[Operand], full: Array, empty: Array, work: Work
    ) -> None:
        """All tiles; then waits until nobody will arrive at this CTA's barriers any more."""
        tile, stages = self.tile, self.stages
        weights = m_side if tile.swapped else n_side
        self._prefetch(weights, work)
        # Operands may be what the kernel before this one has written.
        ptx.griddepcontrol(ptx.GridDepAction.WAIT)
        leads = work.rank % tile.ctas == 0
        for index in cutlass.range(work.mine, unroll=1):
            place = place_of(tile, work, index)
            for step in cutlass.range(work.steps, unroll=1):
                count = index * work.steps + step
                stage, turn = count % stages, count // stages
                wait(empty.subview(stage), turn - 1)
                barrier = full.subview(stage)
                if leads:
                    ptx.mbarrier_arrive_expect_tx(barrier, tile.stage_bytes * tile.ctas)
                for operand in m_side:
                    self._bring_m(operand, place, work, work.first_step + step, stage, barrier)
                for operand in n_side:
                    self._bring_n(operand, place, work, work.first_step + step, stage, barrier)
        # From here on nothing is loaded that the next kernel would have to share bandwidth with.
        ptx.griddepcontrol(ptx.GridDepAction.LAUNCH_DEPENDENTS)
        for last in cutlass.range_constexpr(stages):
            count = work.mine * work.steps + last
            wait(empty.subview(count % stages), count // stages - 1)

    @cute.jit
    def _prefetch(self, weights: list[Operand], work: Work) -> None:
        """Asks L2 for the first tile's weights, which no kernel before this one is writing.

        A prefetch reads nothing that could be stale, so that it may come before the wait.
        """
        tile = self.tile
        place = place_of(tile, work, Int32(0))
        for operand in weights:
            ptx.prefetch_tensormap(operand.data_map.get_ptr())
            ptx.prefetch_tensormap(operand.scale_map.get_ptr())
        for step in cutlass.range(cutlass.min(work.steps, self.stages), unroll=1):
            byte = (work.first_step + step) * TILE_BYTES
            row = self._m_row(place, work) if tile.swapped else self._n_row(place, work)
            batch = place.batch * work.weight_stride
            for operand in weights:
                ptx.cp_async_bulk_tensor_prefetch(
                    operand.data_map.get_ptr(), [byte, row, batch], []
                )

    def _m_row(self, place: Place, work: Work) -> Int32:
        """First row that this CTA loads of its tile of the M side."""
        tile = self.tile
        slice_rows = CTA_ROWS // tile.cluster_n
        slice_row = place_in_row(tile, work) * slice_rows
        return place.m * tile.rows + work.rank % tile.ctas * CTA_ROWS + slice_row

    def _n_row(self, place: Place, work: Work) -> Int32:
        """First row that this CTA loads of its tile of the N side."""
        tile = self.tile
        slice_row = place_in_column(tile, work) // tile.ctas * (tile.b_rows // tile.sharers_b)
        return place.n * tile.columns + work.rank % tile.ctas * tile.b_rows + slice_row

    @cute.jit
    def _bring_m(
        self, operand: Operand, place: Place, work: Work, step: Int32, stage: Int32, full: Array
    ) -> None:
        """This CTA's slice of its M operand, for all CTAs in its row of the cluster."""
        tile = self.tile
        mask = mask_of_row(tile, work)
        turn = place_in_row(tile, work)
        slice_bytes = CTA_ROWS // tile.cluster_n * TILE_BYTES
        data = operand.data.subview(stage * (CTA_ROWS * TILE_BYTES) + turn * slice_bytes)
        row = self._m_row(place, work)
        batch = place.batch * work.weight_stride if tile.swapped else place.batch
        self._copy(operand.data_map, [step * TILE_BYTES, row, batch], data, full, mask)
        atoms = ATOMS_K // tile.cluster_n
        scales = operand.scales.subview((stage * ATOMS_K + turn * atoms) * ATOM_BYTES)
        row_atom = place.m * tile.ctas + work.rank % tile.ctas
        atom = step * ATOMS_K + turn * atoms
        self._copy(operand.scale_map, [0, row_atom, atom, batch], scales, full, mask)

    @cute.jit
    def _bring_n(
        self, operand: Operand, place: Place, work: Work, step: Int32, stage: Int32, full: Array
    ) -> None:
        """This CTA's slice of its N operand, for the CTAs in its column of the cluster.

        Those of a pair hold different rows, but both hold all of the scales.
        """
        tile = self.tile
        turn = place_in_column(tile, work)
        slice_bytes = tile.b_rows // tile.sharers_b * TILE_BYTES
        data_turn = turn // tile.ctas
        data = operand.data.subview(stage * (tile.b_rows * TILE_BYTES) + data_turn * slice_bytes)
        row = self._n_row(place, work)
        batch = place.batch if tile.swapped else place.batch * work.weight_stride
        self._copy(
            operand.data_map,
            [step * TILE_BYTES, row, batch],
            data,
            full,
            mask_of_column(tile, work, same_half=True),
        )
        atoms = ATOMS_K // tile.sharers_sfb
        offset = (stage * ATOMS_K + turn * atoms) * (tile.atoms_n * ATOM_BYTES)
        row_atom = place.n * tile.columns // ATOM_ROWS
        atom = step * ATOMS_K + turn * atoms
        self._copy(
            operand.scale_map,
            [0, row_atom, atom, batch],
            operand.scales.subview(offset),
            full,
            mask_of_column(tile, work, same_half=False),
        )

    def _copy(
        self,
        tensor_map: TensorMap,
        place: list[Int32],
        target: Array,
        full: Array,
        mask: Int16 | None,
    ) -> None:
        """One copy; in a pair, its bytes count on the first CTA's mbarrier."""
        ptx.cp_async_bulk_tensor_shared_cluster_global(
            target,
            tensor_map.get_ptr(),
            place,
            full,
            [],
            multicast_mask=mask,
            group=ptx.CTAGroup.CTA_2 if self.tile.two_sm else ptx.CTAGroup.CTA_1,
        )


# --- the cluster: rank = place along M + cluster_m · place along N -------------------------------


def place_in_row(tile: Tile, work: Work) -> Int32 | int:
    """Which of the CTAs with the same M operand this is."""
    return work.rank // tile.cluster_m if tile.cluster_n > 1 else 0


def place_in_column(tile: Tile, work: Work) -> Int32 | int:
    """Which of the CTAs with the same N operand this is."""
    return work.rank % tile.cluster_m if tile.cluster_m > 1 else 0


def mask_of_row(tile: Tile, work: Work) -> Int16 | None:
    """CTAs with the same M operand; None if it is this one alone."""
    if tile.cluster_n == 1:
        return None
    row = sum(1 << (tile.cluster_m * n) for n in range(tile.cluster_n))
    return Int16(row << (work.rank % tile.cluster_m))


def mask_of_column(tile: Tile, work: Work, same_half: bool) -> Int16 | None:
    """CTAs with the same N operand; of pairs, those with the same half of it, or both."""
    each = tile.ctas if same_half else 1
    if tile.cluster_m == each:
        return None
    column = sum(1 << m for m in range(0, tile.cluster_m, each))
    start = work.rank // tile.cluster_m * tile.cluster_m
    return Int16(column << (start + work.rank % each))


def mask_of_readers(tile: Tile, work: Work) -> Int16 | None:
    """CTAs that load what this tile's MMAs read: they wait for those MMAs."""
    if tile.split_k > 1 or tile.cluster == 1:
        return None
    row = sum(1 << (tile.cluster_m * n) for n in range(tile.cluster_n)) * ((1 << tile.ctas) - 1)
    column = (1 << tile.cluster_m) - 1
    first = work.rank % tile.cluster_m // tile.ctas * tile.ctas
    return Int16((row << first) | (column << (work.rank // tile.cluster_m * tile.cluster_m)))
