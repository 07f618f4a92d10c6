"""Static scheduler: the queries and key tiles of a CTA."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Array, Int32
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.indexer.sm100.tile import KEYS
from nvfp4_kernels.sm100.limits import WARP_ROWS


class Sizes(NamedTuple):
    """Problem sizes of a launch, passed by value.

    Attributes:
        sequences: number of sequences; a query sees keys of its own sequence; 1 unless paged.
        queries: number of queries per sequence.
        keys: number of columns of the result: number of keys, or bound on the longest context.
        splits: number of CTAs among which the keys of a CTA's block of queries are split.
    """

    sequences: Int32
    queries: Int32
    keys: Int32
    splits: Int32


class KeyRanges(NamedTuple):
    """Keys that queries see: int32 [sequences, queries] in global memory.

    Attributes:
        begins: first key that each query sees; null: 0.
        ends: key after the last key that each query sees.
    """

    begins: cute.Pointer
    ends: cute.Pointer


@dataclass(frozen=True)
class KeyRange:
    """Range of keys, ``begin <= key < end``."""

    begin: Int32
    end: Int32


@dataclass(frozen=True)
class TileScheduler:
    """Scheduler state of a CTA: queries of a sequence, and some of their visible key tiles.

    Unscored queries count as seeing no key. Masked key tiles, which no query of the CTA sees, are
    also split among CTAs, as ``LogitsVisitor`` must write −∞ for their keys.

    Attributes:
        split, num_splits: index of the CTA's split of the keys, and number of splits.
        sequence: index of the sequence.
        first_query: index of the CTA's first query, counted over all sequences.
        num_queries: number of queries of the CTA.
        key_end: key after the last key that a query of the CTA sees.
        tiles_per_split: number of visible key tiles per split; the last splits may have fewer.
        first_tile, num_tiles: the CTA's visible key tiles: index of the first, and number.
        seen_begin, seen_end: range of visible key tiles of all splits together.
        first_masked, num_masked: the CTA's masked key tiles: index of the first among masked tiles,
            and number.
        num_keys: number of columns of the result.
    """

    split: Int32
    num_splits: Int32
    sequence: Int32
    first_query: Int32
    num_queries: Int32
    key_end: Int32
    tiles_per_split: Int32
    first_tile: Int32
    num_tiles: Int32
    seen_begin: Int32
    seen_end: Int32
    first_masked: Int32
    num_masked: Int32
    num_keys: Int32

    def masked_tile(self, index: Int32) -> Int32:
        """Index, among all key tiles, of the CTA's ``index``-th masked tile."""
        number = self.first_masked + index
        between = self.seen_end - self.seen_begin
        return Int32(cutlass.select_(number < self.seen_begin, number, number + between))


@cute.jit
def key_range(
    variant: cutlass.Constexpr, ranges: KeyRanges, query: Int32, num_keys: Int32
) -> KeyRange:
    """Range of keys that a query sees, clamped to the ``num_keys`` columns of the result.

    ``query``: index of the query, counted over all sequences.
    """
    begin = Int32(0)
    if cutlass.const_expr(not variant.paged):
        begin = cutlass.max(Array(ranges.begins, shape=(1,)).load(query), 0)
    end = cutlass.min(Array(ranges.ends, shape=(1,)).load(query), num_keys)
    return KeyRange(begin, end)


@cute.jit
def tile_scheduler(
    tile: cutlass.Constexpr,
    variant: cutlass.Constexpr,
    sizes: Sizes,
    ranges: KeyRanges,
    min_keys: Int32,
) -> TileScheduler:
    """Scheduler state of this CTA; all lanes of a warp must call this function together.

    The last queries of a sequence, which may see the most keys, are scheduled first. Queries that
    see fewer than ``min_keys`` keys are not scored.
    """
    block_index = cute.arch.block_idx()[0]
    split, block_index = block_index % sizes.splits, block_index // sizes.splits
    blocks = cute.ceil_div(sizes.queries, tile.queries)
    block, sequence = blocks - 1 - block_index % blocks, block_index // blocks
    first = sequence * sizes.queries + block * tile.queries
    queries = cutlass.min(sizes.queries - block * tile.queries, tile.queries)

    begin, end = sizes.keys, Int32(0)
    for number in cutlass.range_constexpr(0, tile.queries, WARP_ROWS):
        query = number + cute.arch.lane_idx()
        if query < queries:
            seen = key_range(variant, ranges, first + query, sizes.keys)
            if seen.end - seen.begin >= min_keys:
                begin, end = cutlass.min(begin, seen.begin), cutlass.max(end, seen.end)
    begin = ptx.redux_sync(begin, ptx.ReductionKind.MIN, cute.arch.FULL_MASK)
    end = ptx.redux_sync(end, ptx.ReductionKind.MAX, cute.arch.FULL_MASK)

    seen_begin, seen_end = begin // KEYS, cute.ceil_div(end, KEYS)
    if end == 0:
        seen_begin = Int32(0)
    tiles = seen_end - seen_begin
    first_tile, tiles = _split_range(tiles, split, sizes.splits)
    masked = cute.ceil_div(sizes.keys, KEYS) - (seen_end - seen_begin)
    first_masked, masked = _split_range(masked, split, sizes.splits)
    return TileScheduler(
        split=split,
        num_splits=sizes.splits,
        sequence=sequence,
        first_query=first,
        num_queries=queries,
        key_end=end,
        tiles_per_split=cute.ceil_div(seen_end - seen_begin, sizes.splits),
        first_tile=seen_begin + first_tile,
        num_tiles=tiles,
        seen_begin=seen_begin,
        seen_end=seen_end,
        first_masked=first_masked,
        num_masked=masked,
        num_keys=sizes.keys,
    )


def _split_range(count: Int32, split: Int32, splits: Int32) -> tuple[Int32, Int32]:
    """First item and number of items of one of ``splits`` splits of ``count`` items."""
    each = cute.ceil_div(count, splits)
    first = split * each
    return first, cutlass.min(cutlass.max(count - first, 0), each)
