"""Output of the chosen keys, in ascending order."""

import cutlass
import cutlass.cute as cute
from cutlass import Array, Float32, Int32, Int64, Uint32, Uint64

from nvfp4_kernels.indexer.sm100.best_keys.candidates import TopkOutput
from nvfp4_kernels.indexer.sm100.scheduler import KeyRange, TileScheduler
from nvfp4_kernels.indexer.sm100.tile import KEYS
from nvfp4_kernels.indexer.topk.keys import column_of, order_of, value_of
from nvfp4_kernels.indexer.topk.result import mark, place_of
from nvfp4_kernels.indexer.topk.shared import OFFERED, Cta, sum_before_in_cta, sum_of_warp
from nvfp4_kernels.indexer.topk.tile import WARP


@cute.jit
def write(
    cta: Cta,
    out: TopkOutput,
    scheduler: TileScheduler,
    query: Int32,
    seen: KeyRange,
    whole: cutlass.Constexpr,
) -> None:
    """Write a query's best keys, or, unless the CTA scored the ``whole`` of its keys, candidates.

    Args:
        cta: thread group; all its threads take part.
        out: result of the launch.
        scheduler: scheduler state of the CTA.
        query: index of the query, counted over all sequences.
        seen: keys that it sees.
        whole: see ``Selection``.
    """
    length = cutlass.max(seen.end - seen.begin, 0)
    start = Int64(query) * out.stride
    before, count = Int32(0), cutlass.min(length, out.top_k)
    if length <= out.top_k:
        if scheduler.split == 0:
            _write_all(cta, out, start, length, whole)
    else:
        if cutlass.const_expr(not whole):
            before = candidates_before(scheduler, seen, scheduler.split, out.top_k, cta.lane)
            count = candidates_before(scheduler, seen, scheduler.num_splits, out.top_k, cta.lane)
        _write_in_order(cta, out, scheduler, start + before, seen, whole)
    if (scheduler.split == 0) & (cta.thread == 0):
        Array(out.counts, shape=(1,)).store(count, query)


@cute.jit
def _write_all(
    cta: Cta, out: TopkOutput, start: Int64, length: Int32, whole: cutlass.Constexpr
) -> None:
    """Write every key that the query sees; candidates get neither scores nor padding."""
    keys = Array(out.keys, shape=(1,)).subview(start)
    end = out.top_k
    if cutlass.const_expr(not whole):
        end = length
    for at in range(cta.thread, end, cta.config.threads):
        keys.store(Int32(cutlass.select_(at < length, at, Int32(-1))), at)


@cute.jit
def candidates_before(
    scheduler: TileScheduler, seen: KeyRange, split: Int32, top_k: Int32, lane: Int32
) -> Int32:
    """Candidates of a query in the splits before ``split``: all keys they see, or ``top_k``."""
    total = Int32(0)
    for earlier in range(lane, split, WARP):
        first = (scheduler.seen_begin + earlier * scheduler.tiles_per_split) * KEYS
        last = cutlass.min(seen.end, first + scheduler.tiles_per_split * KEYS)
        visible = cutlass.max(last - cutlass.max(seen.begin, first), 0)
        total += cutlass.min(visible, top_k)
    return sum_of_warp(total)


@cute.jit
def _write_in_order(
    cta: Cta,
    out: TopkOutput,
    scheduler: TileScheduler,
    start: Int64,
    seen: KeyRange,
    whole: cutlass.Constexpr,
) -> None:
    """Write the buffer's candidates that are no less than the threshold, from ``start`` on.

    The bitmap orders as many keys at a time as it has bits.
    """
    shared, threads = cta.shared, cta.config.threads
    entries, threshold = shared.cells[OFFERED], shared.threshold[0]
    bits = WARP * cta.config.words
    first = cutlass.max(scheduler.first_tile * KEYS - seen.begin, 0)
    end = cutlass.min(seen.end, (scheduler.first_tile + scheduler.num_tiles) * KEYS) - seen.begin
    for origin in range(first, end, bits):
        shared.counts.store(Int32(0), cta.thread)
        for word in range(cta.thread, cta.config.words, threads):
            shared.bitmap.store(Uint32(0), word)
        cta.meet()
        for at in range(cta.thread, entries, threads):
            candidate = shared.buffer[at]
            bit = column_of(candidate).bitcast(Int32) - origin
            if (candidate >= threshold) & (bit >= 0) & (bit < bits):
                mark(cta, bit)
        cta.meet()
        before, total = sum_before_in_cta(cta, shared.counts[cta.thread])
        shared.counts.store(before, cta.thread)
        cta.meet()
        for at in range(cta.thread, entries, threads):
            candidate = shared.buffer[at]
            bit = column_of(candidate).bitcast(Int32) - origin
            if (candidate >= threshold) & (bit >= 0) & (bit < bits):
                _store(out, start + place_of(cta, bit), candidate, whole)
        start += total
        cta.meet()  # the bitmap is read before it is cleared


def _store(out: TopkOutput, at: Int64, candidate: Uint64, whole: bool) -> None:
    """Store a key's number, and the score of a candidate."""
    Array(out.keys, shape=(1,)).store(column_of(candidate).bitcast(Int32), at)
    if not whole:
        score: Float32 = value_of(order_of(candidate))
        Array(out.scores, shape=(1,)).store(score, at)
