"""Which queries and keys a CTA has."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Int32
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.indexer.sm100.tile import KEYS
from nvfp4_kernels.sm100.limits import WARP_ROWS


@dataclass(frozen=True)
class Sizes:
    """Host integers of a launch.

    Attributes:
        sequences: whose queries see keys of their own; 1 unless paged.
        queries: of each.
        columns: of the result: keys, or what the longest context may have.
        splits: CTAs that share the keys of some queries.
        least: keys that a query must see to be scored; those of others are not looked at.
    """

    sequences: Int32
    queries: Int32
    columns: Int32
    splits: Int32
    least: Int32


@dataclass(frozen=True)
class Ranges:
    """What queries see: int32 [sequences, queries] in global memory.

    Attributes:
        begins: first key; null: 0.
        ends: the key after the last.
    """

    begins: cute.Pointer
    ends: cute.Pointer


@dataclass(frozen=True)
class Range:
    """The keys ``begin <= key < end``."""

    begin: Int32
    end: Int32


@dataclass(frozen=True)
class Work:
    """One CTA's part: some queries of one sequence, against some of the key tiles that they see.

    Queries that are not scored see none. Key tiles that none of them sees, the hidden ones, are
    shared out too: somebody has to say so.

    Attributes:
        split, splits: of the keys: which, and how many.
        sequence: its index.
        first_query: among those of all sequences.
        queries: of the CTA.
        end: the key after the last that one of them sees.
        each: tiles of a split; the last ones may have fewer.
        first_tile, tiles: seen by one of them, and this CTA's.
        seen_begin, seen_end: all such tiles.
        first_hidden, hidden: this CTA's of the hidden tiles, counted without those between.
        columns: of the result.
    """

    split: Int32
    splits: Int32
    sequence: Int32
    first_query: Int32
    queries: Int32
    end: Int32
    each: Int32
    first_tile: Int32
    tiles: Int32
    seen_begin: Int32
    seen_end: Int32
    first_hidden: Int32
    hidden: Int32
    columns: Int32

    def hidden_tile(self, index: Int32) -> Int32:
        """The ``index``-th of this CTA's."""
        number = self.first_hidden + index
        between = self.seen_end - self.seen_begin
        return Int32(cutlass.select_(number < self.seen_begin, number, number + between))


@cute.jit
def range_of(variant: cutlass.Constexpr, ranges: Ranges, query: Int32, columns: Int32) -> Range:
    """Of one query, counted over all sequences; never beyond the result."""
    begin = Int32(0)
    if cutlass.const_expr(not variant.paged):
        begin = cutlass.max(Array(ranges.begins, shape=(1,)).load(query), 0)
    end = cutlass.min(Array(ranges.ends, shape=(1,)).load(query), columns)
    return Range(begin, end)


@cute.jit
def work_of(
    tile: cutlass.Constexpr, variant: cutlass.Constexpr, sizes: Sizes, ranges: Ranges
) -> Work:
    """This CTA's ``Work``, by a whole warp. The last queries, which may see most, come first."""
    place = cute.arch.block_idx()[0]
    split, place = place % sizes.splits, place // sizes.splits
    blocks = cute.ceil_div(sizes.queries, tile.queries)
    block, sequence = blocks - 1 - place % blocks, place // blocks
    first = sequence * sizes.queries + block * tile.queries
    queries = cutlass.min(sizes.queries - block * tile.queries, tile.queries)

    begin, end = sizes.columns, Int32(0)
    for number in cutlass.range_constexpr(0, tile.queries, WARP_ROWS):
        query = number + cute.arch.lane_idx()
        if query < queries:
            seen = range_of(variant, ranges, first + query, sizes.columns)
            if seen.end - seen.begin >= sizes.least:
                begin, end = cutlass.min(begin, seen.begin), cutlass.max(end, seen.end)
    begin = ptx.redux_sync(begin, ptx.ReductionKind.MIN, cute.arch.FULL_MASK)
    end = ptx.redux_sync(end, ptx.ReductionKind.MAX, cute.arch.FULL_MASK)

    seen_begin, seen_end = begin // KEYS, cute.ceil_div(end, KEYS)
    if end == 0:
        seen_begin = Int32(0)
    tiles = seen_end - seen_begin
    first_tile, tiles = _share(tiles, split, sizes.splits)
    hidden = cute.ceil_div(sizes.columns, KEYS) - (seen_end - seen_begin)
    first_hidden, hidden = _share(hidden, split, sizes.splits)
    return Work(
        split=split,
        splits=sizes.splits,
        sequence=sequence,
        first_query=first,
        queries=queries,
        end=end,
        each=cute.ceil_div(seen_end - seen_begin, sizes.splits),
        first_tile=seen_begin + first_tile,
        tiles=tiles,
        seen_begin=seen_begin,
        seen_end=seen_end,
        first_hidden=first_hidden,
        hidden=hidden,
        columns=sizes.columns,
    )


def _share(count: Int32, split: Int32, splits: Int32) -> tuple[Int32, Int32]:
    """First, and how many of ``count`` things are those of one split."""
    each = cute.ceil_div(count, splits)
    first = split * each
    return first, cutlass.min(cutlass.max(count - first, 0), each)
