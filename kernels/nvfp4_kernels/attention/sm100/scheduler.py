"""Scheduler: assigns query rows and keys to CTAs, and rows to threads."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Array, Int32

from nvfp4_kernels.attention.sm100.tile import KEYS, AttentionTile, Variant
from nvfp4_kernels.sm100.limits import WARP_ROWS


class Sizes(NamedTuple):
    """Problem sizes of a launch, passed by value.

    Attributes:
        batch: number of sequences.
        queries: maximum number of queries of a sequence; if dense, the number in every sequence; if
            indexed, 1.
        keys: if dense, number of keys of each sequence; if ragged, of all sequences; if indexed,
            maximum number of keys of a list; if paged, unused.
        pages: number of pages of keys: if dense, ``batch``; if ragged, 1.
        kv_heads: number of KV heads.
        group: number of query heads per KV head.
        splits: number of CTAs that divide the keys of a block of rows.
        window: number of keys that a query sees; 0: all.
        max_resident_ctas: maximum number of resident CTAs; read by the static persistent scheduler.
    """

    batch: Int32
    queries: Int32
    keys: Int32
    pages: Int32
    kv_heads: Int32
    group: Int32
    splits: Int32
    window: Int32
    max_resident_ctas: Int32


class SequenceLengths(NamedTuple):
    """Starts and lengths of sequences: int32 in global memory; null where the layout lacks them.

    In the indexed layout ``query_start`` has one start per sequence, but ``seq_lens`` the length of
    each token's list of keys.
    """

    query_start: cute.Pointer
    key_start: cute.Pointer
    seq_lens: cute.Pointer


@dataclass(frozen=True)
class PersistentOrder:
    """Order of the static persistent scheduler: all first splits, then all second splits, ….

    Splits without keys thus come last. Divisors come from the host, as a division on the device
    takes a hundred cycles.

    Attributes:
        heads: fast divisor by the number of KV heads.
        sequences: fast divisor by the number of sequences.
    """

    heads: cute.FastDivmodDivisorV2
    sequences: cute.FastDivmodDivisorV2


class PipelineCounts(NamedTuple):
    """Numbers of tiles that the CTA processes before a work tile; barrier phases follow from them.

    Attributes:
        kv_tiles: number of key tiles.
        work_tiles: number of work tiles with keys.
        tail_tiles: number of key tiles with rows past a sequence's last key.
        first_work_tiles: number of work tiles with keys for the first query tile.
        first_kv_tiles, second_kv_tiles: numbers of key tiles of the first and second query tile.
    """

    kv_tiles: Int32
    work_tiles: Int32
    tail_tiles: Int32
    first_work_tiles: Int32
    first_kv_tiles: Int32
    second_kv_tiles: Int32

    def of_one_query_tile(self) -> "PipelineCounts":
        """Counts if a CTA has one query tile: equal counts then share a register."""
        kv_tiles, work_tiles, tail_tiles, *_ = self
        return PipelineCounts(kv_tiles, work_tiles, tail_tiles, work_tiles, kv_tiles, Int32(0))


@dataclass(frozen=True)
class WorkTile:
    """Work tile of a CTA: a block of rows of one sequence and KV head, and a range of keys.

    Attributes:
        batch, kv_head, split: indices of sequence, KV head and split; if indexed, ``batch`` is the
            token.
        first_row: index of the CTA's first row among the sequence's ``rows`` = queries · group.
        rows: number of rows of the sequence.
        first_query: index of the sequence's first query among the queries of all sequences.
        first_key: index of the sequence's first key among the keys of all sequences; 0 unless
            ragged.
        keys: number of keys of the sequence.
        position: position of the sequence's first query; negative if there are fewer keys than
            queries.
        first_tile: index of the first key tile.
        tiles: number of key tiles of each query tile; 0 for a query tile without rows.
        parts: number of splits with key tiles; 1 without split-KV.
        group: query heads per KV head.
        window: number of keys that a query sees; 0: all.
        before: pipeline counts of this CTA before the work tile.
    """

    batch: Int32
    kv_head: Int32
    split: Int32
    first_row: Int32
    rows: Int32
    first_query: Int32
    first_key: Int32
    keys: Int32
    position: Int32
    first_tile: Int32
    tiles: list[Int32]
    parts: Int32
    group: Int32
    window: Int32
    before: PipelineCounts

    def max_tiles(self) -> Int32:
        """Largest number of key tiles of any query tile."""
        found = self.tiles[0]
        for count in self.tiles[1:]:
            found = cutlass.max(found, count)
        return found

    def kv_tile(self, query_tile: Int32 | int, index: Int32) -> Int32:
        """Number of the ``index``-th key tile of a query tile, counted over all work tiles."""
        before: Int32 | int = self.before.first_kv_tiles
        if len(self.tiles) > 1 and isinstance(query_tile, int):
            before = self.before[-2:][query_tile]
        elif len(self.tiles) > 1:
            first, second = self.before[-2:]
            before = cutlass.select_(query_tile == 0, first, second)
        return before + index

    def after(self) -> PipelineCounts:
        """Pipeline counts after this work tile."""
        tiles, before = self.max_tiles(), self.before
        has_tail = (tiles > 0) & (self.keys < (self.first_tile + tiles) * KEYS)
        one, none = Int32(1), Int32(0)
        second = before.second_kv_tiles
        return PipelineCounts(
            before.kv_tiles + tiles,
            before.work_tiles + cutlass.select_(tiles > 0, one, none),
            before.tail_tiles + cutlass.select_(has_tail, one, none),
            before.first_work_tiles + cutlass.select_(self.tiles[0] > 0, one, none),
            before.first_kv_tiles + self.tiles[0],
            second + self.tiles[1] if len(self.tiles) > 1 else second,
        )


def is_static_persistent(tile: AttentionTile, variant: Variant) -> bool:
    """Whether the scheduler is static persistent, so that the next work tile's keys load early.

    True for work tiles of few rows, which are memory-bound. The indexed layout is never persistent.
    """
    return tile.warp_split_kv and variant.layout != "indexed"


@cute.jit
def work_tile(
    tile: cutlass.Constexpr,
    variant: cutlass.Constexpr,
    sizes: Sizes,
    lengths: SequenceLengths,
    order: Any,
    number: Any,
    before: PipelineCounts,
) -> WorkTile:
    """Work tile ``number``; the last queries, which see the most keys, are scheduled first.

    Args:
        tile: tile of the kernel.
        variant: variant of the kernel.
        sizes: sizes of the launch.
        lengths: starts and lengths of sequences.
        order: ``PersistentOrder`` if static persistent, else None.
        number: index of the work tile in ``order``; without an order, grid index of the CTA
            launched for the work tile.
        before: pipeline counts of this CTA before the work tile.
    """
    if cutlass.const_expr(is_static_persistent(tile, variant)):
        block = Int32(cute.arch.grid_dim()[2] - 1 - cute.arch.block_idx()[2])
        rest, kv_head = divmod(number, order.heads)
        split, batch = divmod(rest, order.sequences)
        kv_head, split, batch = Int32(kv_head), Int32(split), Int32(batch)
    else:
        head_split, batch, block = number
        block = cute.arch.grid_dim()[2] - 1 - block
        if cutlass.const_expr(variant.layout == "indexed"):
            head_split, batch = batch, head_split
        split, kv_head = head_split % sizes.splits, head_split // sizes.splits
    first_query, first_key = batch * sizes.queries, Int32(0)
    queries, keys = sizes.queries, sizes.keys
    if cutlass.const_expr(variant.layout == "indexed"):
        end = Array(lengths.query_start, shape=(1,)).load(sizes.batch)
        queries = cutlass.select_(batch < end, Int32(1), Int32(0))
        keys = cutlass.min(Array(lengths.seq_lens, shape=(1,)).load(batch), keys)
    elif cutlass.const_expr(variant.layout != "dense"):
        # Keys before queries, so that all loads start before the thread waits for any.
        if cutlass.const_expr(variant.layout == "varlen"):
            first_key, keys = _span(lengths.key_start, batch)
        else:
            keys = Array(lengths.seq_lens, shape=(1,)).load(batch)
        first_query, queries = _span(lengths.query_start, batch)
    rows, first_row = queries * sizes.group, block * tile.rows
    position = keys - queries

    first_tile = Int32(0)
    if cutlass.const_expr(variant.window):
        oldest = position + first_row // sizes.group - sizes.window + 1
        first_tile = cutlass.max(oldest, 0) // KEYS
    counts = []
    for each in cutlass.range_constexpr(tile.query_tiles):
        begin = first_row + each * tile.tile_rows
        seen = keys
        if cutlass.const_expr(variant.causal):
            newest = position + (cutlass.min(begin + tile.tile_rows, rows) - 1) // sizes.group
            seen = cutlass.min(newest + 1, keys)
        count = cute.ceil_div(cutlass.max(seen, 0), KEYS) - first_tile
        counts.append(cutlass.select_(begin < rows, cutlass.max(count, 0), Int32(0)))
    parts = Int32(1)
    if cutlass.const_expr(variant.split):
        max_tiles = counts[0] if tile.query_tiles == 1 else cutlass.max(counts[0], counts[1])
        split_tiles = cute.ceil_div(max_tiles, sizes.splits)
        parts = cute.ceil_div(max_tiles, cutlass.max(split_tiles, 1))
        skipped = split * split_tiles
        first_tile = first_tile + skipped
        counts = [cutlass.min(cutlass.max(count - skipped, 0), split_tiles) for count in counts]
    return WorkTile(
        batch=batch,
        kv_head=kv_head,
        split=split,
        first_row=first_row,
        rows=rows,
        first_query=first_query,
        first_key=first_key,
        keys=keys,
        position=position,
        first_tile=first_tile,
        tiles=counts,
        parts=parts,
        group=sizes.group,
        window=sizes.window,
        before=before,
    )


def _span(starts: cute.Pointer, batch: Int32) -> tuple[Int32, Int32]:
    """Start and length of sequence ``batch``."""
    data = Array(starts, shape=(1,))
    start = data.load(batch)
    return start, data.load(batch + 1) - start


@dataclass(frozen=True)
class QueryRow:
    """Row of a thread: one head of one query.

    Attributes:
        live: whether the sequence has the row.
        token: index of the query among the sequence's queries.
        head: index of the head in the group.
        begin, end: range of keys that the row sees, ``begin <= key < end``.
        all_begin, all_end: range of keys that every row of the warp sees.
    """

    live: cutlass.Boolean
    token: Int32
    head: Int32
    begin: Int32
    end: Int32
    all_begin: Int32
    all_end: Int32


@cute.jit
def query_row(
    tile: cutlass.Constexpr,
    variant: cutlass.Constexpr,
    work: WorkTile,
    query_tile: Int32,
    warp: Int32,
) -> QueryRow:
    """Row of this lane in warp ``warp`` of a query tile."""
    first = work.first_row + query_tile * tile.tile_rows
    if cutlass.const_expr(not tile.warp_split_kv):
        first = first + warp * WARP_ROWS
    row = first + cute.arch.lane_idx()
    token = row // work.group
    begin, end = Int32(0), work.keys
    all_begin, all_end = Int32(0), work.keys
    if cutlass.const_expr(variant.causal):
        # Rows past the sequence's end see no key past its last one either.
        end = cutlass.min(work.position + token + 1, work.keys)
        all_end = cutlass.min(work.position + first // work.group + 1, work.keys)
    if cutlass.const_expr(variant.window):
        begin = work.position + token - work.window + 1
        last = first + WARP_ROWS - 1
        all_begin = work.position + last // work.group - work.window + 1
    return QueryRow(row < work.rows, token, row % work.group, begin, end, all_begin, all_end)
