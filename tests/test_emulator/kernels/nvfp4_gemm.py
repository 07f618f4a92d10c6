"""NVFP4 GEMM for sm_100a: warp-specialised, persistent, one or two SMs to a tile.

C [M, N] = A [M, K] · B [N, K]ᵀ, both of packed E2M1 with E4M3 scales per 16 elements in the
tensor core's blocked layout. Six warps: four store, one issues MMAs, one issues loads.

    loads  --full-->  MMA  --ready-->  epilogue
           <-empty--       <-drained-

Each arrow is an mbarrier per stage of operands, or per accumulator. Every synchronisation is
written inline: the emulator's mutants remove or change each.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda_driver
import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Array, GridConstant, Int16, Int32, Int64, Uint8
from cutlass.experimental import primitives as ptx
from cutlass.experimental.cuda import TensorMap, TensorMapSwizzle, create_tensor_map_tiled

from tests.test_emulator.kernels.config import (
    ATOM_BYTES,
    ATOM_COLUMNS,
    ATOMS_K,
    CTA_ROWS,
    MMA_K,
    STORE_BYTES,
    STORE_ROWS,
    STORE_SLOTS,
    STORE_WARPS,
    TENSOR_COLUMNS,
    TILE_BYTES,
    TILE_K,
    GemmConfig,
)

MMA_WARP = STORE_WARPS
LOAD_WARP = MMA_WARP + 1
THREADS = 32 * (LOAD_WARP + 1)


@dataclass(frozen=True)
class Maps:
    """Tensor maps of the operands."""

    a: TensorMap
    sfa: TensorMap
    b: TensorMap
    sfb: TensorMap
    c: TensorMap


@dataclass(frozen=True)
class Shared:
    """A CTA's shared memory.

    Attributes:
        full, empty: mbarriers per stage: bytes have arrived; MMAs have read them.
        ready, drained: mbarriers per accumulator: the tile is complete; the epilogue has read it.
        tensor: address of the tensor memory.
    """

    full: Array
    empty: Array
    ready: Array
    drained: Array
    tensor: Array
    a: Array
    b: Array
    sfa: Array
    sfb: Array
    c: Array


@dataclass(frozen=True)
class Tiles:
    """Tiles of C that one cluster computes, down the columns of C.

    Attributes:
        first: index of the first tile.
        apart: stride between tiles: the number of clusters in the grid.
        mine: number of this cluster's tiles.
        down: number of tiles in a column of C.
        steps: number of steps along K.
        rank: this CTA's rank in its cluster.
    """

    first: Int32
    apart: Int32
    mine: Int32
    down: Int32
    steps: Int32
    rank: Int32

    def place(self, index: Int32) -> tuple[Int32, Int32]:
        """Row and column of the ``index``-th tile, in tiles."""
        tile = self.first + index * self.apart
        return tile % self.down, tile // self.down


@cute.jit
def wait(barrier: Array, phase: Int32, scope: cutlass.Constexpr = ptx.MBarrierScope.CTA) -> None:
    """Block until the mbarrier's phase number ``phase``, from 0, is complete.

    ``scope`` must include the threads whose work is waited for.
    """
    while not ptx.mbarrier_try_wait_parity(
        barrier, phase & 1, scope=scope, order=ptx.MemOrder.ACQUIRE
    ):
        pass


class Nvfp4Gemm:
    """One compiled variant of the GEMM.

    Args:
        config: the variant.
        c_type: ``cutlass.Float16``, ``BFloat16`` or ``Float32``.
    """

    def __init__(self, config: GemmConfig, c_type: type[cutlass.Numeric]) -> None:
        self.config = config
        self.c_type = c_type
        self.group = ptx.CTAGroup.CTA_2 if config.two_sm else ptx.CTAGroup.CTA_1
        self.peers = 0b11 if config.two_sm else None
        # Scope of waits for the pair's other CTA and its MMAs.
        self.scope = ptx.MBarrierScope.CLUSTER if config.two_sm else ptx.MBarrierScope.CTA
        self.store_columns = STORE_BYTES * 8 // c_type.width

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,
        sfa: cute.Pointer,
        b: cute.Pointer,
        sfb: cute.Pointer,
        c: cute.Pointer,
        m: Int32,
        n: Int32,
        k: Int32,
        sms: Int32,
        stream: cuda_driver.CUstream,
    ) -> None:
        """Launch on up to ``sms`` SMs.

        ``a`` [m, k/2], ``b`` [n, k/2] and the scales [ceil(rows/128), ceil(k/64), 32, 16] are
        bytes; k is a multiple of 32, rows of ``c`` [m, n] are multiples of 16 bytes.
        """
        config = self.config
        maps = Maps(
            a=self._operand_map(a, m, k, CTA_ROWS),
            sfa=self._scale_map(sfa, m, k, 1, ATOMS_K),
            b=self._operand_map(b, n, k, config.b_rows),
            sfb=self._scale_map(sfb, n, k, config.atoms_n, ATOMS_K // config.ctas),
            c=create_tensor_map_tiled(
                c.toint(),
                self.c_type,
                [n, m],
                [n * (self.c_type.width // 8) // 16],
                [self.store_columns, STORE_ROWS],
                swizzle=TensorMapSwizzle.s128b,
            ),
        )
        tiles = cute.ceil_div(m, config.tile_m) * cute.ceil_div(n, config.tile_n)
        self.kernel(maps.a, maps.sfa, maps.b, maps.sfb, maps.c, m, n, k).launch(
            grid=(cutlass.min(tiles, sms // config.ctas) * config.ctas, 1, 1),
            block=(THREADS, 1, 1),
            cluster=(config.ctas, 1, 1),
            stream=stream,
        )

    def _operand_map(self, data: cute.Pointer, rows: Int32, k: Int32, box_rows: int) -> TensorMap:
        return create_tensor_map_tiled(
            data.toint(),
            Uint8,
            [k // 2, rows],
            [k // 32],
            [TILE_BYTES, box_rows],
            swizzle=TensorMapSwizzle.s128b,
        )

    def _scale_map(
        self, scales: cute.Pointer, rows: Int32, k: Int32, box_rows: int, box_k: int
    ) -> TensorMap:
        """Tensor map of atoms of 512 bytes; in shared memory, atoms along K are outermost."""
        across = cute.ceil_div(k, MMA_K)
        return create_tensor_map_tiled(
            scales.toint(),
            cutlass.Uint16,
            [ATOM_BYTES // 2, cute.ceil_div(rows, 128), across],
            [across * (ATOM_BYTES // 16), ATOM_BYTES // 16],
            [ATOM_BYTES // 2, box_rows, box_k],
        )

    @cute.kernel
    def kernel(
        self,
        map_a: GridConstant[TensorMap],
        map_sfa: GridConstant[TensorMap],
        map_b: GridConstant[TensorMap],
        map_sfb: GridConstant[TensorMap],
        map_c: GridConstant[TensorMap],
        m: Int32,
        n: Int32,
        k: Int32,
    ) -> None:
        """Set up, run one role per warp, and tear down."""
        config = self.config
        shared = self._allocate()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = ptx.cluster_ctarank()

        # The CTAs of a pair allocate together, so each must know that the other has started.
        if cutlass.const_expr(config.two_sm):
            ptx.barrier_cluster_arrive_relaxed()
        if warp == MMA_WARP and ptx.elect_sync():
            self._initialise_barriers(shared)
        if cutlass.const_expr(config.two_sm):
            ptx.barrier_cluster_wait()
        if warp == 0:
            ptx.tcgen05_alloc(shared.tensor, TENSOR_COLUMNS, group=self.group)
            ptx.tcgen05_relinquish_alloc_permit(group=self.group)
        self._meet()

        down = cute.ceil_div(m, config.tile_m)
        first = cute.arch.block_idx()[0] // config.ctas
        apart = cute.arch.grid_dim()[0] // config.ctas
        mine = cute.ceil_div(down * cute.ceil_div(n, config.tile_n) - first, apart)
        tiles = Tiles(first, apart, mine, down, cute.ceil_div(k, TILE_K), rank)
        if warp == LOAD_WARP:
            if ptx.elect_sync():
                self._load(Maps(map_a, map_sfa, map_b, map_sfb, map_c), shared, tiles)
        elif warp == MMA_WARP:
            if rank == 0:
                self._multiply(shared, tiles)
        else:
            self._store(map_c, shared, tiles, warp)

        # No CTA may exit while a peer may still arrive on its mbarriers, or free memory that a peer
        # reads.
        self._meet()
        if warp == 0:
            ptx.tcgen05_fence(ptx.Tcgen05Fence.AFTER_THREAD_SYNC)
            ptx.tcgen05_dealloc(
                ptx.make_tmem_ptr(shared.tensor.load(), cutlass.Float32),
                TENSOR_COLUMNS,
                group=self.group,
            )

    def _allocate(self) -> Shared:
        config = self.config

        def array(dtype: type[cutlass.Numeric], count: int, alignment: int = 8) -> Array:
            return Array(dtype, count, space=AddressSpace.smem, alignment=alignment)

        scales = config.stages * ATOMS_K * ATOM_BYTES
        slots = STORE_WARPS * STORE_SLOTS * STORE_ROWS
        return Shared(
            full=array(Int64, config.stages),
            empty=array(Int64, config.stages),
            ready=array(Int64, config.accumulators),
            drained=array(Int64, config.accumulators),
            tensor=array(Int32, 1),
            a=array(Uint8, config.stages * CTA_ROWS * TILE_BYTES, 1024),
            b=array(Uint8, config.stages * config.b_rows * TILE_BYTES, 1024),
            sfa=array(Uint8, scales, 128),
            sfb=array(Uint8, scales * config.atoms_n, 128),
            c=array(self.c_type, slots * self.store_columns, 1024),
        )

    def _initialise_barriers(self, shared: Shared) -> None:
        config = self.config
        for stage in range(config.stages):
            ptx.mbarrier_init(shared.full.subview(stage), 1)
            ptx.mbarrier_init(shared.empty.subview(stage), 1)
        for accumulator in range(config.accumulators):
            ptx.mbarrier_init(shared.ready.subview(accumulator), 1)
            ptx.mbarrier_init(shared.drained.subview(accumulator), STORE_WARPS * config.ctas)
        ptx.fence_mbarrier_init()

    def _meet(self) -> None:
        """Synchronise all threads of the tile's CTAs."""
        if self.config.two_sm:
            ptx.barrier_cluster_arrive()
            ptx.barrier_cluster_wait()
        else:
            ptx.barrier_cta_sync()

    @cute.jit
    def _load(self, maps: Maps, shared: Shared, tiles: Tiles) -> None:
        """Load the operands of every step of every tile, by one thread."""
        config, rank = self.config, tiles.rank
        a_bytes, b_bytes = CTA_ROWS * TILE_BYTES, config.b_rows * TILE_BYTES
        sfa_bytes = ATOMS_K * ATOM_BYTES
        sfb_bytes = sfa_bytes * config.atoms_n

        for index in cutlass.range(tiles.mine, unroll=1):
            tile_m, tile_n = tiles.place(index)
            row_a = tile_m * config.tile_m + rank * CTA_ROWS
            row_b = tile_n * config.tile_n + rank * config.b_rows
            for step in cutlass.range(tiles.steps, unroll=1):
                count = index * tiles.steps + step
                stage, turn = count % config.stages, count // config.stages
                wait(shared.empty.subview(stage), turn - 1, self.scope)
                full = shared.full.subview(stage)
                if rank == 0:
                    ptx.mbarrier_arrive_expect_tx(full, config.stage_bytes * config.ctas)
                a = shared.a.subview(stage * a_bytes)
                self._bring(maps.a, (step * TILE_BYTES, row_a), a, full)
                b = shared.b.subview(stage * b_bytes)
                self._bring(maps.b, (step * TILE_BYTES, row_b), b, full)
                sfa = shared.sfa.subview(stage * sfa_bytes)
                atom = step * ATOMS_K
                self._bring(maps.sfa, (0, row_a // 128, atom), sfa, full)
                # All of B's scales go to both CTAs of a pair; each CTA loads half of K for both.
                sfb = shared.sfb.subview(stage * sfb_bytes + rank * (sfb_bytes // config.ctas))
                atom += rank * (ATOMS_K // config.ctas)
                self._bring(maps.sfb, (0, tile_n * config.atoms_n, atom), sfb, full, self.peers)

        # This CTA's mbarriers must outlive the MMAs' last arrivals.
        for last in cutlass.range_constexpr(config.stages):
            count = tiles.mine * tiles.steps + last
            last_stage = shared.empty.subview(count % config.stages)
            wait(last_stage, count // config.stages - 1, self.scope)

    def _bring(
        self,
        tensor: TensorMap,
        place: tuple[Int32 | int, ...],
        target: Array,
        full: Array,
        mask: int | None = None,
    ) -> None:
        """Issue one copy; in a pair, the copied bytes count on the first CTA's mbarrier."""
        ptx.cp_async_bulk_tensor_shared_cluster_global(
            target,
            tensor.get_ptr(),
            place,
            full,
            [],
            multicast_mask=None if mask is None else Int16(mask),
            group=self.group,
        )

    @cute.jit
    def _multiply(self, shared: Shared, tiles: Tiles) -> None:
        """Issue MMAs by one thread of one warp of each tile's first CTA.

        The whole warp runs the loop: CUDA 13.0's ptxas crashes on MMAs in a loop of one thread.
        """
        config = self.config
        leader = ptx.elect_sync()  # the same lane throughout: commits track a thread's own MMAs
        peers = None if self.peers is None else Int16(self.peers)
        tensor = shared.tensor.load()
        instruction = ptx.Tcgen05MxOmmaInstrDesc.build(
            a_dtype=cutlass.Float4E2M1FN,
            b_dtype=cutlass.Float4E2M1FN,
            scale_format=0,  # E4M3
            m_dim=config.tile_m,
            n_dim=config.tile_n,
            sparsity_version=0,
        )
        a_bytes, b_bytes = CTA_ROWS * TILE_BYTES, config.b_rows * TILE_BYTES
        a_start = self._operand_descriptor(shared.a)
        b_start = self._operand_descriptor(shared.b)
        sfa_start = self._scale_descriptor(shared.sfa)
        sfb_start = self._scale_descriptor(shared.sfb)

        for index in cutlass.range(tiles.mine, unroll=1):
            accumulator, turn = index % config.accumulators, index // config.accumulators
            wait(shared.drained.subview(accumulator), turn - 1, self.scope)
            ptx.tcgen05_fence(ptx.Tcgen05Fence.AFTER_THREAD_SYNC)
            target = tensor + accumulator * config.tile_n
            for step in cutlass.range(tiles.steps, unroll=1):
                count = index * tiles.steps + step
                stage = count % config.stages
                wait(shared.full.subview(stage), count // config.stages)
                a_tile = a_start + stage * (a_bytes // 16)
                b_tile = b_start + stage * (b_bytes // 16)
                sfa_tile = sfa_start + stage * (ATOMS_K * ATOM_BYTES // 16)
                sfb_tile = sfb_start + stage * (ATOMS_K * config.atoms_n * ATOM_BYTES // 16)
                if leader:
                    self._copy_scales(tensor + config.sfa_column, sfa_tile, ATOMS_K)
                    self._copy_scales(
                        tensor + config.sfb_column, sfb_tile, ATOMS_K * config.atoms_n
                    )
                    for part in cutlass.range_constexpr(ATOMS_K):
                        ptx.tcgen05_mma_block_scale(
                            ptx.MMABlockScaleKind.MXF4NVF4,
                            self.group,
                            self._tensor_pointer(target),
                            a_tile + part * (MMA_K // 2 // 16),
                            b_tile + part * (MMA_K // 2 // 16),
                            instruction,
                            enable_input_d=(step > 0) if part == 0 else True,
                            scale_a=self._tensor_pointer(
                                tensor + config.sfa_column + part * ATOM_COLUMNS
                            ),
                            scale_b=self._tensor_pointer(
                                tensor + config.sfb_column + part * ATOM_COLUMNS * config.atoms_n
                            ),
                            scale_vec_size=ptx.Tcgen05MMABlockScale.BLOCK16,
                        )
                    ptx.tcgen05_commit(
                        shared.empty.subview(stage), multicast_mask=peers, group=self.group
                    )
            if leader:
                ptx.tcgen05_commit(
                    shared.ready.subview(accumulator), multicast_mask=peers, group=self.group
                )

    def _tensor_pointer(self, address: Int32) -> Array:
        return ptx.make_tmem_ptr(address, cutlass.Float32)

    def _operand_descriptor(self, data: Array) -> ptx.Tcgen05SmemDesc:
        """Descriptor of swizzled rows of 128 bytes, in groups of eight."""
        swizzle = ptx.Tcgen05SmemSwizzle.SWIZZLE_128B
        return ptx.Tcgen05SmemDesc.build(data, 16, 8 * TILE_BYTES, layout=swizzle)

    def _scale_descriptor(self, scales: Array) -> ptx.Tcgen05SmemDesc:
        """Descriptor of an atom: 32 rows of 16 bytes, in groups of eight."""
        return ptx.Tcgen05SmemDesc.build(scales, 16, 8 * 16)

    def _copy_scales(self, column: Int32, start: Int64, atoms: int) -> None:
        shape, spread = ptx.S2TCopyMode.S2T_32x128b_WARPX4
        for atom in range(atoms):
            ptx.tcgen05_cp(
                shape,
                self._tensor_pointer(column + atom * ATOM_COLUMNS),
                start + atom * (ATOM_BYTES // 16),
                group=self.group,
                multicast=spread,
            )

    @cute.jit
    def _store(self, map_c: TensorMap, shared: Shared, tiles: Tiles, warp: Int32) -> None:
        """Convert and store tiles by four warps, each for its 32 lanes of tensor memory."""
        config = self.config
        columns = self.store_columns
        chunk = 128 // self.c_type.width  # elements in 16 bytes
        lane = cute.arch.lane_idx()
        leader = ptx.elect_sync()  # the same lane throughout: bulk groups belong to a thread
        rows = shared.tensor.load() + ((warp * STORE_ROWS) << 16)
        slots = shared.c.subview(warp * (STORE_SLOTS * STORE_ROWS * columns))

        for index in cutlass.range(tiles.mine, unroll=1):
            tile_m, tile_n = tiles.place(index)
            row = tile_m * config.tile_m + tiles.rank * CTA_ROWS + warp * STORE_ROWS
            accumulator, turn = index % config.accumulators, index // config.accumulators
            wait(shared.ready.subview(accumulator), turn, self.scope)
            ptx.tcgen05_fence(ptx.Tcgen05Fence.AFTER_THREAD_SYNC)
            for part in cutlass.range_constexpr(config.tile_n // columns):
                source = self._tensor_pointer(rows + accumulator * config.tile_n + part * columns)
                values = ptx.tcgen05_ld(ptx.Tcgen05LdStShape.SHAPE_32X32B, source, num=columns)
                ptx.tcgen05_wait(ptx.Tcgen05Wait.LOAD)
                if part == config.tile_n // columns - 1:
                    ptx.tcgen05_fence(ptx.Tcgen05Fence.BEFORE_THREAD_SYNC)
                    ptx.bar_warp_sync(cute.arch.FULL_MASK)
                    if leader:
                        self._release(shared.drained.subview(accumulator))

                slot = slots.subview(part % STORE_SLOTS * STORE_ROWS * columns)
                if leader:
                    ptx.cp_async_bulk_wait_group(STORE_SLOTS - 1, read=True)
                ptx.bar_warp_sync(cute.arch.FULL_MASK)
                for piece in cutlass.range_constexpr(columns // chunk):
                    swizzled = (piece ^ (lane & 7)) * chunk
                    slot.store(
                        values[piece * chunk : (piece + 1) * chunk].to(self.c_type),
                        lane * columns + swizzled,
                        alignment=16,
                    )
                ptx.fence_proxy(ptx.Proxy.ASYNC_SHARED, space=ptx.SharedSpace.shared_cta)
                ptx.bar_warp_sync(cute.arch.FULL_MASK)
                if leader:
                    column = tile_n * config.tile_n + part * columns
                    ptx.cp_async_bulk_tensor_global_shared_cta(map_c.get_ptr(), slot, [column, row])
                    ptx.cp_async_bulk_commit_group()
        if leader:
            ptx.cp_async_bulk_wait_group(0, read=True)

    def _release(self, drained: Array) -> None:
        """Arrive on the mbarrier of the first CTA, because that CTA's thread issues the MMAs."""
        if self.config.two_sm:
            ptx.mbarrier_arrive(ptx.mapa(drained, 0), scope=ptx.MemScope.CLUSTER)
        else:
            ptx.mbarrier_arrive(drained)
