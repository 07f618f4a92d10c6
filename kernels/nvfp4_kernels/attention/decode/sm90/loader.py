"""TMA loads of the keys and values of a warp's steps, from the paged cache into the warp's ring."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Float32, Int32, Int64, Uint8
from cutlass.experimental import primitives as ptx
from cutlass.experimental.cuda import TensorMap, TensorMapSwizzle, create_tensor_map_tiled

from nvfp4_kernels.attention.decode.sm90.scheduler import WorkTile
from nvfp4_kernels.attention.decode.sm90.tile import KEYS, VECTOR_BYTES, DecodeTile, Variant
from nvfp4_kernels.device.types import TYPES

_SWIZZLES = {128: TensorMapSwizzle.s128b, 64: TensorMapSwizzle.s64b}  # by the chunk's bytes
TMA_ARRIVALS = 1  # arrive.expect_tx of the warp's leader


class Strides(NamedTuple):
    """Strides of the cache in elements; each is a multiple of 16 bytes."""

    row: Int64
    head: Int64
    page: Int64


class CacheScales(NamedTuple):
    """Factors that dequantise an E4M3 cache's keys and values, float32; null for other caches."""

    k_scale: cute.Pointer
    v_scale: cute.Pointer


@dataclass(frozen=True)
class Cache:
    """Paged cache in global memory with a tensor map, block table and slots of the new tokens.

    ``scales``: values of ``CacheScales``, keys' and values'; 1 unless the cache is E4M3.
    """

    data: cute.Pointer
    tensor_map: TensorMap
    strides: Strides
    table: cute.Pointer
    table_stride: Int64
    slots: cute.Pointer
    scales: list[Float32]


@dataclass(frozen=True)
class Ring:
    """Ring of one warp.

    Attributes:
        data: float32 words [stage, box, chunk, key, word], swizzled; a key is followed by its
            value, which may begin within a chunk.
        full: mbarrier of each stage, completed by ``TMA_ARRIVALS`` and the copies' bytes.
    """

    data: Array
    full: Array


def cache_map(
    variant: Variant,
    tile: DecodeTile,
    data: cute.Pointer,
    strides: Strides,
    kv_heads: Int32,
    pages: Int32,
) -> TensorMap:
    """Tensor map of the cache, [element of a chunk, row of a page, chunk, head, page]."""
    units, chunk = VECTOR_BYTES // tile.element_bytes, tile.chunk_bytes // tile.element_bytes
    return create_tensor_map_tiled(
        data.toint(),
        Uint8 if tile.fp8 else TYPES[variant.dtype],
        [chunk, variant.page_size, tile.chunks, kv_heads, pages],
        [
            strides.row // units,
            Int64(tile.chunk_bytes // VECTOR_BYTES),
            strides.head // units,
            strides.page // units,
        ],
        [chunk, KEYS, tile.chunks, 1, 1],
        swizzle=_SWIZZLES[tile.chunk_bytes],
    )


@dataclass(frozen=True)
class TmaLoader:
    """TMA loads of a warp, issued by a leader lane; all lanes must read a stage before a refill."""

    tile: DecodeTile
    variant: Variant

    @cute.jit
    def start(self, cache: Cache, ring: Ring, work: WorkTile, leader: Boolean) -> None:
        """Initialise the ring's barriers and load the first steps, one per stage."""
        stages = self.tile.stages
        pages = [self.pages(cache, work, Int32(index)) for index in range(stages)]
        if leader:
            for stage in cutlass.range_constexpr(stages):
                ptx.mbarrier_init(ring.full.subview(stage), TMA_ARRIVALS)
            ptx.fence_mbarrier_init()
        ptx.bar_warp_sync(cute.arch.FULL_MASK)
        for index in cutlass.range_constexpr(stages):
            self.load_step(cache, ring, work, Int32(index), pages[index], leader)

    def pages(self, cache: Cache, work: WorkTile, index: Int32) -> list[Int32]:
        """Pages of the boxes of the warp's ``index``-th step."""
        return [self._page(cache, work, index, box) for box in range(self.tile.boxes)]

    @cute.jit
    def _page(self, cache: Cache, work: WorkTile, index: Int32, box: cutlass.Constexpr) -> Int32:
        """Page of a box; −1 past the last key: out of bounds, so that TMA fills in zeros."""
        page = Int32(-1)
        if self._has_keys(work, index, box):
            page = load_page(cache, work, self._key(work, index, box) // self.variant.page_size)
        return page

    @cute.jit
    def load_step(
        self,
        cache: Cache,
        ring: Ring,
        work: WorkTile,
        index: Int32,
        pages: list[Int32],
        leader: Boolean,
    ) -> None:
        """Load the warp's ``index``-th step, if any; no lane may still read the step's stage."""
        tile = self.tile
        if leader and index < work.steps:
            stage = index % tile.stages
            full = ring.full.subview(stage)
            ptx.mbarrier_arrive_expect_tx(full, tile.stage_bytes)
            for box in cutlass.range_constexpr(tile.boxes):
                row = self._key(work, index, box) % self.variant.page_size
                ptx.cp_async_bulk_tensor_shared_cluster_global(
                    ring.data.subview((stage * tile.boxes + box) * (tile.box_bytes // 4)),
                    cache.tensor_map.get_ptr(),
                    [0, row, 0, work.kv_head, pages[box]],
                    full,
                    [],
                )

    def _has_keys(self, work: WorkTile, index: Int32, box: int) -> Boolean:
        """Whether a step's box has keys; the first box of each step always has keys."""
        return self._key(work, index, box) < work.end if box else index < work.steps

    def _key(self, work: WorkTile, index: Int32, box: int) -> Int32:
        """Index in the sequence of the first key of a step's box."""
        return (work.first + index * self.tile.step_stride + box) * KEYS


def load_page(cache: Cache, work: WorkTile, entry: Int32) -> Int32:
    """Load entry ``entry`` of the block table's row of the sequence."""
    row = Int64(work.sequence) * cache.table_stride
    return Int32(Array(cache.table, shape=(1,)).load(row + entry))
