"""Keys and values of a warp's steps, from the cache's pages into its ring."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Int32, Int64
from cutlass.experimental import primitives as ptx
from cutlass.experimental.cuda import TensorMap, TensorMapSwizzle, create_tensor_map_tiled

from nvfp4_kernels.decode_attention.sm90.scheduler import Work
from nvfp4_kernels.decode_attention.sm90.tile import CHUNK, KEYS, DecodeTile, Variant
from nvfp4_kernels.device.types import TYPES
from nvfp4_kernels.sm90.limits import ROW_BYTES


@dataclass(frozen=True)
class Strides:
    """Elements from one to the next, in the cache: multiples of 16 bytes."""

    row: Int64
    head: Int64
    page: Int64


@dataclass(frozen=True)
class Cache:
    """The paged cache in global memory, a map of it, the table of its pages, the tokens' slots."""

    data: cute.Pointer
    tensor_map: TensorMap
    strides: Strides
    table: cute.Pointer
    table_stride: Int64
    slots: cute.Pointer


@dataclass(frozen=True)
class Ring:
    """A warp's own stages.

    Attributes:
        data: float32 words [stage, box, chunk, key, 32], 128-byte swizzle: chunks of the key,
            then of the value.
        full: mbarrier of each stage.
    """

    data: Array
    full: Array


def cache_map(
    variant: Variant, tile: DecodeTile, data: cute.Pointer, strides: Strides, heads: Int32, n: Int32
) -> TensorMap:
    """[chunk's elements, row of a page, chunk, head, page], ``n`` pages; 16 keys of a box."""
    units = 16 // 2
    return create_tensor_map_tiled(
        data.toint(),
        TYPES[variant.dtype],
        [CHUNK, variant.page_size, tile.chunks, heads, n],
        [
            strides.row // units,
            Int64(ROW_BYTES // 16),
            strides.head // units,
            strides.page // units,
        ],
        [CHUNK, KEYS, tile.chunks, 1, 1],
        swizzle=TensorMapSwizzle.s128b,
    )


@dataclass(frozen=True)
class Loader:
    """What the leader of a warp does for it.

    | barrier | arrivals | by |
    |---|---|---|
    | ``full[stage]`` | 1 and its bytes | the copy |
    """

    tile: DecodeTile
    variant: Variant

    @cute.jit
    def start(self, cache: Cache, ring: Ring, work: Work, leader: Boolean) -> None:
        """The first steps, as many as there are stages."""
        stages = self.tile.stages
        pages = [self.pages(cache, work, Int32(index)) for index in range(stages)]
        if leader:
            for stage in cutlass.range_constexpr(stages):
                ptx.mbarrier_init(ring.full.subview(stage), 1)
            ptx.fence_mbarrier_init()
        ptx.bar_warp_sync(cute.arch.FULL_MASK)
        for index in cutlass.range_constexpr(stages):
            self.bring(cache, ring, work, Int32(index), pages[index], leader)

    def pages(self, cache: Cache, work: Work, index: Int32) -> list[Int32]:
        """Where the boxes of the warp's ``index``-th step lie."""
        return [self._page(cache, work, index, box) for box in range(self.tile.boxes)]

    @cute.jit
    def _page(self, cache: Cache, work: Work, index: Int32, box: cutlass.Constexpr) -> Int32:
        """−1 for a box past the last key: out of the map, whose copy is all zeros."""
        page = Int32(-1)
        if self._has(work, index, box):
            page = page_of(cache, work, self._key(work, index, box) // self.variant.page_size)
        return page

    @cute.jit
    def bring(
        self,
        cache: Cache,
        ring: Ring,
        work: Work,
        index: Int32,
        pages: list[Int32],
        leader: Boolean,
    ) -> None:
        """The warp's ``index``-th step, if it has one, into a stage that nobody reads any more."""
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

    def _has(self, work: Work, index: Int32, box: int) -> Boolean:
        """Whether there are keys in a step's box: in the first one of each step."""
        return self._key(work, index, box) < work.end if box else index < work.steps

    def _key(self, work: Work, index: Int32, box: int) -> Int32:
        """The first one of a step's box."""
        return (work.first + index * self.tile.round + box) * KEYS


def page_of(cache: Cache, work: Work, entry: Int32) -> Int32:
    """An entry of the sequence's row of the table."""
    row = Int64(work.sequence) * cache.table_stride
    return Int32(Array(cache.table, shape=(1,)).load(row + entry))
