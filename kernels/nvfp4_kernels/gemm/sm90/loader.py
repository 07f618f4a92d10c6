"""TMA producer warp, which loads tokens and weights of every K step of every tile."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Int32, Int64
from cutlass.experimental import primitives as ptx
from cutlass.experimental.cuda import TensorMap, TensorMapSwizzle, create_tensor_map_tiled

from nvfp4_kernels.device.mbarrier import wait
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.formats.fragments import TILE
from nvfp4_kernels.gemm.sm90.scheduler import SchedulerState, TileCoord, matrix, tile_coord
from nvfp4_kernels.gemm.sm90.tile import Tile
from nvfp4_kernels.sm90.limits import ROW_BYTES, WARPGROUP, ActDtype

EVICT_FIRST = 0x12F0000000000000  # result of createpolicy.fractional.L2::evict_first.b64


@dataclass(frozen=True)
class Weight:
    """Weight in fragments, or stack of weights, in global memory."""

    data: cute.Pointer
    scales: cute.Pointer


@dataclass(frozen=True)
class Ring:
    """Ring of stages in shared memory: tokens and weights.

    Attributes:
        tokens: bytes [stage, K tile, token, 128], 128-byte swizzle.
        data: codes of the weight, words [stage, 64-row weight tile, K tile, 512 or 1024].
        scales: block scales of the weight, words [stage, 64-row weight tile, K tile, 64 or 128].
        full, empty: an mbarrier of each kind per stage.
    """

    tokens: Array
    data: Array
    scales: Array
    full: Array
    empty: Array


def map_of_tokens(tile: Tile, act: ActDtype, x: cute.Pointer, m: Int32, k: Int32) -> TensorMap:
    """Tensor map of the activations; one box holds a stage's tokens.

    With one K tile per stage the dimensions are ``[k, token]``: TMA fills a partial last K tile
    with zeros. With several K tiles the dimensions are ``[k in K tile, token, K tile]``: K must be
    a multiple of the K tile.
    """
    width = tile.tile_k
    sizes, steps, box = [k, m], [Int64(k * TYPES[act].width // 128)], [width, tile.tokens]
    if tile.k_tiles > 1:
        sizes, box = [width, m, k // width], [*box, tile.k_tiles]
        steps.append(Int64(ROW_BYTES // 16))
    return create_tensor_map_tiled(
        x.toint(), TYPES[act], sizes, steps, box, swizzle=TensorMapSwizzle.s128b
    )


@dataclass(frozen=True)
class TmaLoader:
    """Role of the thread that issues all loads.

    | barrier | arrivals | by |
    |---|---|---|
    | ``full[stage]`` | 1, and bytes | this thread; its TMA copies |
    | ``empty[stage]`` | 128 per warpgroup of the stage's slice | every thread, after its reads |
    """

    tile: Tile
    stages: int

    @property
    def empty_arrivals(self) -> int:
        return WARPGROUP * self.tile.warpgroups // self.tile.slices

    @cute.jit
    def run(
        self,
        token_map: TensorMap,
        weights: list[Weight],
        ring: Ring,
        state: SchedulerState,
        n: Int32,
        k: Int32,
    ) -> None:
        """Load tokens and weights for every K step of all tiles."""
        stages = self.stages
        ahead = Int32(0)
        if cutlass.const_expr(self.tile.knows_weights):
            ahead = self._load_ahead(token_map, weights, ring, state, n, k)
        # The next kernel may start as soon as there is room. Not before this kernel's wait: results
        # of earlier kernels are then complete, and the next kernel may read them without waiting.
        ptx.griddepcontrol(ptx.GridDepAction.LAUNCH_DEPENDENTS)
        for index in cutlass.range(state.num_tiles, unroll=1):
            coord = tile_coord(state, index)
            for step in cutlass.range(state.steps, unroll=1):
                count = index * state.steps + step
                if count >= ahead:
                    stage = count % stages
                    wait(ring.empty.subview(stage), count // stages - 1)
                    self._load_weights(weights, ring, coord, state.first_k_step + step, stage, n, k)
                    self._load_tokens(token_map, ring, coord, state.first_k_step + step, stage)

    @cute.jit
    def _load_ahead(
        self,
        token_map: TensorMap,
        weights: list[Weight],
        ring: Ring,
        state: SchedulerState,
        n: Int32,
        k: Int32,
    ) -> Int32:
        """Load the first stages: weights, then wait for the preceding kernel, then tokens.

        No running kernel writes weights (see ``fragments.settled``). Returns the number of K steps
        loaded.
        """
        ahead = cutlass.min(state.steps, self.stages)
        if cutlass.const_expr(self.tile.grouped):
            ahead = cutlass.min(ahead, ahead * state.num_tiles)  # nothing without a tile
        coord = tile_coord(state, Int32(0))
        ptx.prefetch_tensormap(token_map.get_ptr())
        for step in cutlass.range(ahead, unroll=1):
            self._load_weights(weights, ring, coord, state.first_k_step + step, step, n, k)
        ptx.griddepcontrol(ptx.GridDepAction.WAIT)
        for step in cutlass.range(ahead, unroll=1):
            self._load_tokens(token_map, ring, coord, state.first_k_step + step, step)
        return ahead

    @cute.jit
    def _load_weights(
        self,
        weights: list[Weight],
        ring: Ring,
        coord: TileCoord,
        step: Int32,
        stage: Int32,
        n: Int32,
        k: Int32,
    ) -> None:
        tile = self.tile
        full = ring.full.subview(stage)
        ptx.mbarrier_arrive_expect_tx(full, tile.stage_bytes)
        for index in cutlass.range_constexpr(tile.operands):
            weight = self._weight(weights, index)
            first = self._first(coord, step, index, n, k)
            target = (stage * tile.operands + index) * tile.k_tiles
            self._copy(weight.data, first, ring.data, target, full, tile.data_bytes)
            self._copy(weight.scales, first, ring.scales, target, full, tile.scale_bytes)

    def _weight(self, weights: list[Weight], operand: int) -> Weight:
        """Weight of the ``operand``-th tile of a stage: gate and up alternate."""
        return weights[operand % len(weights)]

    def _first(self, coord: TileCoord, step: Int32, operand: int, n: Int32, k: Int32) -> Int64:
        """Index in the weight, or stack of weights, of the first K tile that an operand loads."""
        tile = self.tile
        row = coord.rows * (tile.rows // TILE) + operand // tile.weights
        # Past the last row the loaded values are undefined, and not stored.
        row = cutlass.min(row, cute.ceil_div(n, TILE) - 1)
        rows = Int64(row)
        if tile.grouped:
            rows += Int64(matrix(tile, coord, operand)) * cute.ceil_div(n, TILE)
        return rows * cute.ceil_div(k, tile.tile_k) + step * tile.k_tiles

    def _copy(
        self, source: cute.Pointer, first: Int64, ring: Array, target: Int32, full: Array, size: int
    ) -> None:
        """Copy an operand's K tiles of a stage, contiguous in global and in shared memory."""
        ptx.cp_async_bulk_shared_cluster_global(
            ring.subview(target * (size // 4)),
            Array(source, shape=(1,)).subview(first * size),
            full,
            size * self.tile.k_tiles,
            **self._cache_hint(),
        )

    def _cache_hint(self) -> dict[str, Int64]:
        """L2 hint: evict weights first that other CTAs rarely read."""
        return {"l2_cache_hint": Int64(EVICT_FIRST)} if self.tile.streams_weights else {}

    @cute.jit
    def _load_tokens(
        self, token_map: TensorMap, ring: Ring, coord: TileCoord, step: Int32, stage: Int32
    ) -> None:
        tile = self.tile
        tokens = coord.tokens * tile.tokens
        ptx.cp_async_bulk_tensor_shared_cluster_global(
            ring.tokens.subview(stage * tile.k_tiles * tile.tokens * ROW_BYTES),
            token_map.get_ptr(),
            [step * tile.tile_k, tokens] if tile.k_tiles == 1 else [0, tokens, step * tile.k_tiles],
            ring.full.subview(stage),
            [],
        )
