"""Output of the selected keys, in ascending order."""

import cutlass
import cutlass.cute as cute
from cutlass import Array, Float32, Int32, Int64, Uint32, Uint64

from nvfp4_kernels.indexer.sm100.best_keys.candidates import TopkOutput
from nvfp4_kernels.indexer.sm100.scheduler import KeyRange, TileScheduler
from nvfp4_kernels.indexer.sm100.tile import KEYS
from nvfp4_kernels.indexer.topk.keys import column_of, order_of, value_of
from nvfp4_kernels.indexer.topk.result import output_index, set_bit
from nvfp4_kernels.indexer.topk.shared import APPENDED, ThreadGroup, group_exclusive_sum, warp_sum
from nvfp4_kernels.indexer.topk.tile import WARP


@cute.jit
def write(
    group: ThreadGroup,
    out: TopkOutput,
    scheduler: TileScheduler,
    query: Int32,
    seen: KeyRange,
    whole: cutlass.Constexpr,
) -> None:
    """Write a query's top-k keys or, if not ``whole``, the candidates of this CTA's split.

    Args:
        group: thread group; all its threads take part.
        out: output of the launch.
        scheduler: scheduler state of the CTA.
        query: index of the query, counted over all sequences.
        seen: keys that the query sees.
        whole: see ``Selection``.
    """
    length = cutlass.max(seen.end - seen.begin, 0)
    start = Int64(query) * out.stride
    before, count = Int32(0), cutlass.min(length, out.top_k)
    if length <= out.top_k:
        if scheduler.split == 0:
            _write_all(group, out, start, length, whole)
    else:
        if cutlass.const_expr(not whole):
            before = candidates_before(scheduler, seen, scheduler.split, out.top_k, group.lane)
            count = candidates_before(scheduler, seen, scheduler.num_splits, out.top_k, group.lane)
        _write_in_order(group, out, scheduler, start + before, seen, whole)
    if (scheduler.split == 0) & (group.thread == 0):
        Array(out.counts, shape=(1,)).store(count, query)


@cute.jit
def _write_all(
    group: ThreadGroup, out: TopkOutput, start: Int64, length: Int32, whole: cutlass.Constexpr
) -> None:
    """Write all ``length`` keys that the query sees and, if ``whole``, pad with −1; no scores."""
    keys = Array(out.keys, shape=(1,)).subview(start)
    end = out.top_k
    if cutlass.const_expr(not whole):
        end = length
    for at in range(group.thread, end, group.tile.threads):
        keys.store(Int32(cutlass.select_(at < length, at, Int32(-1))), at)


@cute.jit
def candidates_before(
    scheduler: TileScheduler, seen: KeyRange, split: Int32, top_k: Int32, lane: Int32
) -> Int32:
    """Number of a query's candidates in splits before ``split``: at most ``top_k`` per split."""
    total = Int32(0)
    for earlier in range(lane, split, WARP):
        first = (scheduler.seen_begin + earlier * scheduler.tiles_per_split) * KEYS
        last = cutlass.min(seen.end, first + scheduler.tiles_per_split * KEYS)
        visible = cutlass.max(last - cutlass.max(seen.begin, first), 0)
        total += cutlass.min(visible, top_k)
    return warp_sum(total)


@cute.jit
def _write_in_order(
    group: ThreadGroup,
    out: TopkOutput,
    scheduler: TileScheduler,
    start: Int64,
    seen: KeyRange,
    whole: cutlass.Constexpr,
) -> None:
    """Write the buffer's candidates that reach the threshold, in order of keys, from ``start`` on.

    The bitmap has one bit per key; each pass processes a range of keys as long as the bitmap.
    """
    shared, threads = group.shared, group.tile.threads
    entries, threshold = shared.counters[APPENDED], shared.threshold[0]
    bits = WARP * group.tile.words
    first = cutlass.max(scheduler.first_tile * KEYS - seen.begin, 0)
    end = cutlass.min(seen.end, (scheduler.first_tile + scheduler.num_tiles) * KEYS) - seen.begin
    for origin in range(first, end, bits):
        shared.counts.store(Int32(0), group.thread)
        for word in range(group.thread, group.tile.words, threads):
            shared.bitmap.store(Uint32(0), word)
        group.sync()
        for at in range(group.thread, entries, threads):
            candidate = shared.buffer[at]
            bit = column_of(candidate).bitcast(Int32) - origin
            if (candidate >= threshold) & (bit >= 0) & (bit < bits):
                set_bit(group, bit)
        group.sync()
        before, total = group_exclusive_sum(group, shared.counts[group.thread])
        shared.counts.store(before, group.thread)
        group.sync()
        for at in range(group.thread, entries, threads):
            candidate = shared.buffer[at]
            bit = column_of(candidate).bitcast(Int32) - origin
            if (candidate >= threshold) & (bit >= 0) & (bit < bits):
                _store(out, start + output_index(group, bit), candidate, whole)
        start += total
        group.sync()  # the bitmap is read before it is cleared


def _store(out: TopkOutput, at: Int64, candidate: Uint64, whole: bool) -> None:
    """Store the index of a candidate's key at ``at`` and, if not ``whole``, the score."""
    Array(out.keys, shape=(1,)).store(column_of(candidate).bitcast(Int32), at)
    if not whole:
        score: Float32 = value_of(order_of(candidate))
        Array(out.scores, shape=(1,)).store(score, at)
