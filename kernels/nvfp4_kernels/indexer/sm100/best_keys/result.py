"""Writing what is chosen, in the order of keys."""

import cutlass
import cutlass.cute as cute
from cutlass import Array, Float32, Int32, Int64, Uint32, Uint64

from nvfp4_kernels.indexer.sm100.best_keys.candidates import Output
from nvfp4_kernels.indexer.sm100.scheduler import Range, Work
from nvfp4_kernels.indexer.sm100.tile import KEYS
from nvfp4_kernels.indexer.topk.keys import column_of, order_of, value_of
from nvfp4_kernels.indexer.topk.result import mark, place_of
from nvfp4_kernels.indexer.topk.shared import OFFERED, Cta, sum_before_in_cta, sum_of_warp
from nvfp4_kernels.indexer.topk.tile import WARP


@cute.jit
def write(
    cta: Cta, out: Output, work: Work, query: Int32, seen: Range, whole: cutlass.Constexpr
) -> None:
    """A query's best, or, unless the CTA scored the ``whole`` of its keys, candidates.

    Args:
        cta: this thread; all of the group take part.
        out: where to.
        work: the CTA's.
        query: among those of all sequences.
        seen: by it.
        whole: see ``Selection``.
    """
    length = cutlass.max(seen.end - seen.begin, 0)
    start = Int64(query) * out.stride
    before, count = Int32(0), cutlass.min(length, out.top_k)
    if length <= out.top_k:
        if work.split == 0:
            _write_all(cta, out, start, length, whole)
    else:
        if cutlass.const_expr(not whole):
            before = candidates_before(work, seen, work.split, out.top_k, cta.lane)
            count = candidates_before(work, seen, work.splits, out.top_k, cta.lane)
        _write_in_order(cta, out, work, start + before, seen, whole)
    if (work.split == 0) & (cta.thread == 0):
        Array(out.counts, shape=(1,)).store(count, query)


@cute.jit
def _write_all(
    cta: Cta, out: Output, start: Int64, length: Int32, whole: cutlass.Constexpr
) -> None:
    """Every key; candidates that are all wanted need no scores, and nothing behind them."""
    keys = Array(out.keys, shape=(1,)).subview(start)
    end = out.top_k
    if cutlass.const_expr(not whole):
        end = length
    for at in range(cta.thread, end, cta.config.threads):
        keys.store(Int32(cutlass.select_(at < length, at, Int32(-1))), at)


@cute.jit
def candidates_before(work: Work, seen: Range, split: Int32, top_k: Int32, lane: Int32) -> Int32:
    """How many of a query the splits before ``split`` have: all that they see, or ``top_k``."""
    total = Int32(0)
    for earlier in range(lane, split, WARP):
        first = (work.seen_begin + earlier * work.each) * KEYS
        last = cutlass.min(seen.end, first + work.each * KEYS)
        visible = cutlass.max(last - cutlass.max(seen.begin, first), 0)
        total += cutlass.min(visible, top_k)
    return sum_of_warp(total)


@cute.jit
def _write_in_order(
    cta: Cta, out: Output, work: Work, start: Int64, seen: Range, whole: cutlass.Constexpr
) -> None:
    """The buffer's keys from the threshold on, to ``start`` and on.

    As many keys at a time are put in order as the bitmap has bits.
    """
    shared, threads = cta.shared, cta.config.threads
    entries, least = shared.cells[OFFERED], shared.threshold[0]
    bits = WARP * cta.config.words
    first = cutlass.max(work.first_tile * KEYS - seen.begin, 0)
    end = cutlass.min(seen.end, (work.first_tile + work.tiles) * KEYS) - seen.begin
    for origin in range(first, end, bits):
        shared.counts.store(Int32(0), cta.thread)
        for word in range(cta.thread, cta.config.words, threads):
            shared.bitmap.store(Uint32(0), word)
        cta.meet()
        for at in range(cta.thread, entries, threads):
            candidate = shared.buffer[at]
            bit = column_of(candidate).bitcast(Int32) - origin
            if (candidate >= least) & (bit >= 0) & (bit < bits):
                mark(cta, bit)
        cta.meet()
        before, total = sum_before_in_cta(cta, shared.counts[cta.thread])
        shared.counts.store(before, cta.thread)
        cta.meet()
        for at in range(cta.thread, entries, threads):
            candidate = shared.buffer[at]
            bit = column_of(candidate).bitcast(Int32) - origin
            if (candidate >= least) & (bit >= 0) & (bit < bits):
                _store(out, start + place_of(cta, bit), candidate, whole)
        start += total
        cta.meet()  # the bitmap is read no more


def _store(out: Output, at: Int64, candidate: Uint64, whole: bool) -> None:
    Array(out.keys, shape=(1,)).store(column_of(candidate).bitcast(Int32), at)
    if not whole:
        score: Float32 = value_of(order_of(candidate))
        Array(out.scores, shape=(1,)).store(score, at)
