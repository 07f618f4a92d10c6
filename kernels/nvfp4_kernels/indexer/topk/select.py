"""Exact selection of the key of a given rank: radix select by histograms."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint64
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.indexer.topk.shared import (
    ABOVE,
    BEFORE,
    BIN,
    CTA_HISTOGRAM,
    LISTED,
    TOTAL,
    WITHIN,
    ThreadGroup,
    fetch_add,
    group_exclusive_sum,
    increment,
    map_shared_rank,
    sync_cluster,
    warp_sum,
)
from nvfp4_kernels.indexer.topk.tile import BINS, MAX_TIES

DIGIT = BINS.bit_length() - 1


@cute.jit
def histogram_pass(
    group: ThreadGroup,
    entries: Int32,
    low: Uint64,
    high: Uint64,
    hint: Uint64,
    need: Int32,
    histogram: Int32 | int,
    cluster: cutlass.Constexpr,
) -> tuple[Uint64, Uint64, Int32, Int32]:
    """Narrow an interval to the bin of the key of rank ``need``; the greatest key has rank 1.

    All threads of the cluster, or of the group if ``cluster`` is 1, take part; buffers must have
    been written before the last barrier. If the interval has fewer than ``need`` keys (their number
    is the counter ``TOTAL``), the result is meaningless.

    Args:
        group: thread group.
        entries: number of keys in this CTA's buffer.
        low: least key of the interval.
        high: greatest key of the interval.
        hint: ``high``, or a lower key that few keys exceed; these keys share the last bin.
        need: rank of the key.
        histogram: index of the histogram to use; no thread may still read this histogram.
        cluster: number of CTAs whose buffers count: all CTAs of the cluster, or 1.

    Returns:
        Least and greatest key of the bin, rank within the bin, and number of keys in the bin.
    """
    shared, threads = group.shared, group.tile.threads
    bins, base = BINS // threads, BINS * histogram
    for n in cutlass.range_constexpr(bins):
        shared.histograms.store(Int32(0), base + group.thread + n * threads)
    group.sync()
    shift = _shift(hint - low)
    for at in range(group.thread, entries, threads):
        distance = shared.buffer[at] - low
        if distance <= high - low:
            increment(shared.histograms, base + _digit(distance, shift))
    sync_cluster(group, cluster)
    thread_total = Int32(0)
    counted = []
    for n in cutlass.range_constexpr(bins):
        here, before = _cluster_count(group, base + _bin(group, n, bins), cluster)
        counted.append((here, before))
        thread_total += here
    above, total = group_exclusive_sum(group, thread_total)
    for n in cutlass.range_constexpr(bins):
        here, before = counted[n]
        if (above < need) & (need <= above + here):
            shared.counters.store(_bin(group, n, bins), BIN)
            shared.counters.store(here, WITHIN)
            shared.counters.store(above, ABOVE)
            shared.counters.store(before, BEFORE)
        above += here
    if group.thread == 0:
        shared.counters.store(total, TOTAL)
        shared.counters.store(Int32(0), LISTED)
    group.sync()
    found = shared.counters[BIN]
    bin_low = low + (Uint64(found) << shift)
    rest = high - bin_low
    width = (Uint64(1) << shift) - 1
    if (found < BINS - 1) & (width < rest):
        rest = width
    return bin_low, bin_low + rest, need - shared.counters[ABOVE], shared.counters[WITHIN]


@cute.jit
def rank_ties(
    group: ThreadGroup,
    entries: Int32,
    low: Uint64,
    high: Uint64,
    need: Int32,
    within: Int32,
    cluster: cutlass.Constexpr,
) -> Uint64:
    """Key of rank ``need`` in an interval with ``within`` ≤ ``MAX_TIES`` keys.

    The keys are gathered in every CTA's ``ties`` and compared with each other. In a cluster of
    several CTAs, ``greater`` gets each CTA's number of keys above the interval. ``low``, ``high``,
    ``need`` and ``within`` are results of the last ``histogram_pass``; ``entries`` and
    ``cluster`` are as for that function.
    """
    shared = group.shared
    before = shared.counters[BEFORE]
    greater = Int32(0)
    for at in range(group.thread, entries, group.tile.threads):
        key = shared.buffer[at]
        if key > high:
            greater += 1
        elif key >= low:
            slot = before + fetch_add(shared.counters, LISTED, 1)
            for rank in cutlass.range_constexpr(cluster):
                map_shared_rank(shared.ties, rank, cluster).store(key, slot)
    if cutlass.const_expr(cluster > 1):
        greater = warp_sum(greater)
        if group.lane < cluster and greater > 0:
            counts = map_shared_rank(shared.greater, group.lane, cluster)
            pointer = counts.data_ptr(group.rank)
            ptx.red("add", "s32", pointer, greater, mem_order="relaxed", mem_scope="cluster")
    sync_cluster(group, cluster)
    if group.thread < within:
        key = shared.ties[group.thread]
        rank = Int32(1)
        for at in range(within):
            if shared.ties[at] > key:
                rank += 1
        if rank == need:
            shared.threshold.store(key)
    group.sync()
    return shared.threshold[0]


@cute.jit
def select_in_group(
    group: ThreadGroup, entries: Int32, low: Uint64, high: Uint64, need: Int32
) -> Uint64:
    """Key of rank ``need`` among the keys in this group's buffer from ``low`` to ``high``."""
    within = Int32(MAX_TIES + 1)
    while within > MAX_TIES:
        low, high, need, within = histogram_pass(
            group, entries, low, high, high, need, CTA_HISTOGRAM, 1
        )
    return rank_ties(group, entries, low, high, need, within, 1)


def _shift(span: Uint64) -> Uint64:
    """Number of bits by which a distance of up to ``span`` is shifted right to a bin's index."""
    bits = 64 - cute.arch.clz(span).to(Int32)
    return Uint64(cutlass.max(bits - DIGIT, 0))


def _digit(distance: Uint64, shift: Uint64) -> Int32:
    """Index of the bin of a key at ``distance`` from the interval's least key."""
    bin = distance >> shift
    return Int32(cutlass.select_(bin < Uint64(BINS), bin, Uint64(BINS - 1)))


def _bin(group: ThreadGroup, n: int, bins: int) -> Int32:
    """Index of a thread's ``n``-th bin; bins are assigned from the highest down."""
    return BINS - 1 - n - group.thread * bins


def _cluster_count(group: ThreadGroup, index: Int32, cluster: int) -> tuple[Int32, Int32]:
    """Number of keys in a bin over all participating CTAs, and over CTAs of lower rank."""
    histograms = group.shared.histograms
    if cluster == 1:
        return histograms[index], Int32(0)
    total, before = Int32(0), Int32(0)
    for rank in range(cluster):
        count = map_shared_rank(histograms, rank, cluster)[index]
        total += count
        before += Int32(cutlass.select_(Boolean(group.rank > rank), count, Int32(0)))
    return total, before
