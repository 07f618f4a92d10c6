"""Load warp of the indexed layout (sparse attention): TMA gathers of each token's listed keys."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Int32, Int64
from cutlass.experimental import primitives as ptx
from cutlass.experimental.cuda import TensorMap

from nvfp4_kernels.attention.sm100.barriers import Barriers
from nvfp4_kernels.attention.sm100.loader import Source, TmaLoader
from nvfp4_kernels.attention.sm100.rows import load_index
from nvfp4_kernels.attention.sm100.scheduler import WorkTile
from nvfp4_kernels.attention.sm100.tile import KEYS
from nvfp4_kernels.sm100.limits import WARP_ROWS

GATHER_ROWS = KEYS // WARP_ROWS  # 4, as one copy gathers (PTX ISA, .tile::gather4)
OUT_OF_BOUNDS = -1  # row outside the tensor map: TMA fills it with zeros
STARTS_PER_LANE = 8  # loads in flight: a batch of 256 waits for memory once


class MapStrides(NamedTuple):
    """Strides of the cache between pages, heads, and rows of a page, in tensor map rows."""

    page: Int32
    head: Int32
    row: Int32


@dataclass(frozen=True)
class KeyLists:
    """Lists of keys (top-k indices) that tokens attend to.

    Attributes:
        indices: int32 [tokens, stride], positions in the token's sequence.
        stride: elements between lists.
        query_start: int32 [sequences + 1], first token of each sequence, then number of tokens.
        sequences: number of sequences.
        map_strides: strides of the cache in tensor map rows.
    """

    indices: cute.Pointer
    stride: Int32
    query_start: cute.Pointer
    sequences: Int32
    map_strides: MapStrides


@dataclass(frozen=True)
class GatherLoader(TmaLoader):
    """Role of the load warp in the indexed layout: each lane gathers four rows at a time.

    Attributes:
        lists: lists of keys that tokens attend to.
    """

    lists: KeyLists

    @cute.jit
    def _page_table(self, source: Source, work: WorkTile) -> Array:
        """Block table row of the token's sequence, the last that starts at or before the token."""
        lists, lane = self.lists, cute.arch.lane_idx()
        starts = Array(lists.query_start, shape=(1,))
        ended = Int32(0)
        for first in cutlass.range(1, lists.sequences, STARTS_PER_LANE * WARP_ROWS, unroll=1):
            numbers = [first + n * WARP_ROWS + lane for n in range(STARTS_PER_LANE)]
            # All loads are issued before the first is used.
            loaded = [load_index(starts, n, n < lists.sequences) for n in numbers]
            for start in loaded:
                begun = (start >= 0) & (start <= work.first_query)
                ended += cutlass.select_(begun, Int32(1), Int32(0))
        sequence = cute.arch.warp_redux_sync(ended, kind="add")
        return Array(source.table, shape=(1,)).subview(Int64(sequence) * source.table_stride)

    @cute.jit
    def _positions(self, source: Source, work: WorkTile, index: Int32) -> list[Int32]:
        """Positions of this lane's keys of the ``index``-th key tile; −1 past the list's end."""
        lists = self.lists
        start = Int64(work.first_query) * lists.stride
        indices = Array(lists.indices, shape=(1,)).subview(start)
        first = (work.first_tile + index) * KEYS + cute.arch.lane_idx() * GATHER_ROWS
        end = cutlass.min(work.keys, (work.first_tile + work.max_tiles()) * KEYS)
        return [load_index(indices, first + n, first + n < end) for n in range(GATHER_ROWS)]

    @cute.jit
    def _coordinates(self, work: WorkTile, table: Array, positions: list[Int32]) -> list[Int32]:
        """Rows of the tensor maps that hold the keys at ``positions``."""
        strides, size = self.lists.map_strides, self.variant.page_size
        pages = [load_index(table, at // size, at >= 0) for at in positions]
        return [
            cutlass.select_(
                page < 0,
                Int32(OUT_OF_BOUNDS),
                page * strides.page + work.kv_head * strides.head + at % size * strides.row,
            )
            for at, page in zip(positions, pages, strict=True)
        ]

    @cute.jit
    def _load_values(
        self,
        source: Source,
        barriers: Barriers,
        work: WorkTile,
        index: Int32,
        count: Int32,
        coordinates: list[Int32],
        leader: Boolean,
    ) -> None:
        """Load values of a key tile; past the list's end, TMA fills in zeros (out of bounds)."""
        values = source.value_map
        self._load_tile(source, values, barriers, work, index, count, coordinates, leader)

    @cute.jit
    def _issue_copies(
        self,
        source: Source,
        tensor_map: TensorMap,
        work: WorkTile,
        index: Int32,
        stage: Int32,
        coordinates: list[Int32],
        barrier: Array,
        leader: Boolean,
    ) -> None:
        """Issue the gathers of one tile, a chunk at a time."""
        tile = self.tile
        if leader:
            ptx.mbarrier_arrive_expect_tx(barrier, tile.stage_bytes)
        own = cute.arch.lane_idx() * GATHER_ROWS * tile.chunk_bytes
        for chunk in cutlass.range_constexpr(tile.chunks):
            target = source.ring.subview(
                stage * tile.stage_bytes + chunk * KEYS * tile.chunk_bytes + own
            )
            gather4(target, tensor_map, chunk * tile.chunk_elements, coordinates, barrier)


def gather4(
    target: Array, tensor_map: TensorMap, column: int, rows: list[Int32], barrier: Array
) -> None:
    """Gather a chunk, from ``column`` on, of four rows into consecutive rows of ``target``.

    CuTe's own function takes two coordinates; a gather has five (PTX ISA, cp.async.bulk.tensor).
    """
    ptx.inline_ptx(
        "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes "
        "[{$r0}], [{$r1}, {{$r2}, {$r3}, {$r4}, {$r5}, {$r6}}], [{$r7}];",
        read_only_args=[
            target.data_ptr().toint(Int32),
            tensor_map.get_ptr().toint(),
            Int32(column),
            *rows,
            barrier.data_ptr().toint(Int32),
        ],
    )
