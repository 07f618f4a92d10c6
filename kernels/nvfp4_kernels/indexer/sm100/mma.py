"""The MMA warp: keys times queries, one accumulator per key tile."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Int32, Int64
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.device.mbarrier import wait
from nvfp4_kernels.indexer.sm100.barriers import Barriers
from nvfp4_kernels.indexer.sm100.scheduler import Work
from nvfp4_kernels.indexer.sm100.tile import KEYS, ScoreTile
from nvfp4_kernels.sm100.descriptors import row_descriptor, scale_descriptor
from nvfp4_kernels.sm100.limits import ATOM_BYTES, ATOM_COLUMNS, MMA_BYTES
from nvfp4_kernels.sm100.tensor_memory import tensor_pointer

MMA_SCALES = {"nvfp4": 4, "mxfp4": 2}  # bytes that one MMA takes of a word of scales


@dataclass(frozen=True)
class Shared:
    """Operands in shared memory; scales are None where there are none.

    Attributes:
        queries, keys: data; keys are a ring.
        query_atoms, key_atoms: their scales, [word along D, row atom, 512].
    """

    queries: Array
    keys: Array
    query_atoms: Array | None
    key_atoms: Array | None


@dataclass(frozen=True)
class Descriptors:
    """Of what lies in shared memory, of rings the first stage."""

    queries: Int64
    keys: Int64
    query_atoms: Int64
    key_atoms: Int64


@dataclass(frozen=True)
class Multiplier:
    """Role of one warp, which goes round as a whole.

    ptxas of CUDA 13.0 crashes on MMAs in a loop of one thread.
    """

    tile: ScoreTile

    @cute.jit
    def run(self, shared: Shared, barriers: Barriers, tensor: Int32, work: Work) -> None:
        tile = self.tile
        leader = ptx.elect_sync()  # the same lane throughout: commits track a thread's own work
        descriptors = self._descriptors(shared)
        if work.tiles > 0:
            wait(barriers.asked, Int32(0))
            if cutlass.const_expr(tile.block_scaled):
                wait(barriers.graded, Int32(0))
                if leader:
                    column = tensor + tile.query_scale_column
                    self._copy_scales(descriptors.query_atoms, column, tile.query_atoms)
        for index in cutlass.range(work.tiles, unroll=1):
            stage, turn = index % tile.stages, index // tile.stages
            accumulator = index % tile.accumulators
            wait(barriers.full.subview(stage), turn)
            if cutlass.const_expr(tile.block_scaled):
                wait(barriers.scaled.subview(stage), turn)
            wait(barriers.drained.subview(accumulator), index // tile.accumulators - 1)
            ptx.tcgen05_fence(ptx.Tcgen05Fence.AFTER_THREAD_SYNC)
            if leader:
                if cutlass.const_expr(tile.block_scaled):
                    atoms = descriptors.key_atoms + stage * (tile.key_scale_bytes // 16)
                    self._copy_scales(atoms, tensor + tile.key_scale_column, 1)
                target = tensor + accumulator * tile.columns
                for step in cutlass.range_constexpr(tile.steps):
                    self._multiply(descriptors, stage, step, target, tensor)
                ptx.tcgen05_commit(barriers.empty.subview(stage))
                ptx.tcgen05_commit(barriers.ready.subview(accumulator))

    def _descriptors(self, shared: Shared) -> Descriptors:
        width = self.tile.chunk_bytes
        rows = row_descriptor(shared.queries, width), row_descriptor(shared.keys, width)
        if shared.query_atoms is None or shared.key_atoms is None:
            return Descriptors(*rows, Int64(0), Int64(0))
        atoms = scale_descriptor(shared.query_atoms), scale_descriptor(shared.key_atoms)
        return Descriptors(*rows, *atoms)

    def _copy_scales(self, atoms: Int64, column: Int32, across: int) -> None:
        """Shared to tensor memory, replicated for the four warps' lanes (PTX ISA, tcgen05.cp)."""
        shape, spread = ptx.S2TCopyMode.S2T_32x128b_WARPX4
        for atom in range(self.tile.scale_words * across):
            ptx.tcgen05_cp(
                shape,
                tensor_pointer(column + atom * ATOM_COLUMNS),
                atoms + atom * (ATOM_BYTES // 16),
                multicast=spread,
            )

    def _multiply(
        self, descriptors: Descriptors, stage: Int32, step: int, target: Int32, tensor: Int32
    ) -> None:
        """Along D: 32 bytes of each row."""
        tile = self.tile
        per_chunk = tile.chunk_bytes // MMA_BYTES
        chunk, inside = step // per_chunk * tile.chunk_bytes, step % per_chunk * MMA_BYTES
        keys = descriptors.keys + stage * (tile.key_bytes // 16) + (chunk * KEYS + inside) // 16
        queries = descriptors.queries + (chunk * tile.columns + inside) // 16
        if tile.block_scaled:
            self._multiply_scaled(keys, queries, step, target, tensor)
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
            tensor_pointer(target),
            keys,
            queries,
            instruction,
            step > 0,
        )

    def _multiply_scaled(
        self, keys: Int64, queries: Int64, step: int, target: Int32, tensor: Int32
    ) -> None:
        """64 elements, whose scales are a word, or half of one."""
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
            tensor_pointer(target),
            keys,
            queries,
            instruction,
            enable_input_d=step > 0,
            scale_a=tensor_pointer(tensor + tile.key_scale_column + ATOM_COLUMNS * word),
            scale_b=tensor_pointer(
                tensor + tile.query_scale_column + ATOM_COLUMNS * word * tile.query_atoms
            ),
            scale_vec_size=sizes.BLOCK16 if nvfp4 else sizes.BLOCK32,
        )
