"""The load warp where every token has a list of keys: gathers their rows into the ring."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Boolean, Int32, Int64
from cutlass.experimental import primitives as ptx
from cutlass.experimental.cuda import TensorMap

from nvfp4_kernels.attention.sm100.barriers import Barriers
from nvfp4_kernels.attention.sm100.loader import Loader, Source
from nvfp4_kernels.attention.sm100.rows import load_index
from nvfp4_kernels.attention.sm100.scheduler import Work
from nvfp4_kernels.attention.sm100.tile import KEYS
from nvfp4_kernels.sm100.limits import WARP_ROWS

ROWS_AT_ONCE = KEYS // WARP_ROWS  # 4, as one copy gathers (PTX ISA, .tile::gather4)
NOWHERE = -1  # no row of a tensor map: it comes as zeros
STARTS = 8  # that a lane loads at once: a batch of 256 waits for memory once


@dataclass(frozen=True)
class Lists:
    """Which keys tokens have, and where a cache has keys.

    Attributes:
        indices: int32 [tokens, stride], positions in the token's sequence.
        stride: entries.
        query_start: int32 [sequences + 1], tokens.
        sequences: how many.
        page_step, head_step, row_step: rows of the tensor maps from one to the next.
    """

    indices: cute.Pointer
    stride: Int32
    query_start: cute.Pointer
    sequences: Int32
    page_step: Int32
    head_step: Int32
    row_step: Int32


@dataclass(frozen=True)
class Gatherer(Loader):
    """Role of one warp: each lane copies four rows of a chunk at a time, wherever they lie.

    Attributes:
        lists: of this launch.
    """

    lists: Lists

    @cute.jit
    def _table(self, source: Source, work: Work) -> Array:
        """The pages of the token's sequence: as many have ended as begin after the first."""
        lists, lane = self.lists, cute.arch.lane_idx()
        starts = Array(lists.query_start, shape=(1,))
        ended = Int32(0)
        for first in cutlass.range(1, lists.sequences, STARTS * WARP_ROWS, unroll=1):
            numbers = [first + n * WARP_ROWS + lane for n in range(STARTS)]
            # All are on their way before one is looked at.
            loaded = [load_index(starts, n, n < lists.sequences) for n in numbers]
            for start in loaded:
                begun = (start >= 0) & (start <= work.first_query)
                ended += cutlass.select_(begun, Int32(1), Int32(0))
        sequence = cute.arch.warp_redux_sync(ended, kind="add")
        return Array(source.table, shape=(1,)).subview(Int64(sequence) * source.table_stride)

    @cute.jit
    def _ask(self, source: Source, work: Work, index: Int32) -> list[Int32]:
        """Positions of this lane's keys of the ``index``-th key tile; −1 where there is none."""
        lists = self.lists
        start = Int64(work.first_query) * lists.stride
        indices = Array(lists.indices, shape=(1,)).subview(start)
        first = (work.first_tile + index) * KEYS + cute.arch.lane_idx() * ROWS_AT_ONCE
        end = cutlass.min(work.keys, (work.first_tile + work.most_tiles()) * KEYS)
        return [load_index(indices, first + n, first + n < end) for n in range(ROWS_AT_ONCE)]

    @cute.jit
    def _find(self, work: Work, table: Array, positions: list[Int32]) -> list[Int32]:
        """Rows of the tensor maps."""
        lists, size = self.lists, self.variant.page_size
        pages = [load_index(table, at // size, at >= 0) for at in positions]
        return [
            cutlass.select_(
                page < 0,
                Int32(NOWHERE),
                page * lists.page_step
                + work.kv_head * lists.head_step
                + at % size * lists.row_step,
            )
            for at, page in zip(positions, pages, strict=True)
        ]

    @cute.jit
    def _values(
        self,
        source: Source,
        barriers: Barriers,
        work: Work,
        index: Int32,
        count: Int32,
        rows: list[Int32],
        leader: Boolean,
    ) -> None:
        """Nothing follows the last value that had to be cleared."""
        self._copy(source, source.value_map, barriers, work, index, count, rows, leader)

    @cute.jit
    def _bring(
        self,
        source: Source,
        tensor_map: TensorMap,
        work: Work,
        index: Int32,
        stage: Int32,
        rows: list[Int32],
        barrier: Array,
        leader: Boolean,
    ) -> None:
        """One tile, a chunk at a time; rows that are nowhere come as zeros."""
        tile = self.tile
        if leader:
            ptx.mbarrier_arrive_expect_tx(barrier, tile.stage_bytes)
        own = cute.arch.lane_idx() * ROWS_AT_ONCE * tile.chunk_bytes
        for chunk in cutlass.range_constexpr(tile.chunks):
            place = source.ring.subview(
                stage * tile.stage_bytes + chunk * KEYS * tile.chunk_bytes + own
            )
            gather(place, tensor_map, chunk * tile.chunk_elements, rows, barrier)


def gather(
    target: Array, tensor_map: TensorMap, column: int, rows: list[Int32], barrier: Array
) -> None:
    """Four rows' boxes below one another, from ``column`` on.

    PTX ISA, cp.async.bulk.tensor: CuTe's own function takes two coordinates, this needs five.
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
