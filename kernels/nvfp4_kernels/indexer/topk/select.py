"""The key of a given rank, exactly, by histograms over ever narrower intervals of keys."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Uint64
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.indexer.topk.shared import (
    ABOVE,
    BEFORE,
    BIN,
    LISTED,
    OF_CTA,
    TOTAL,
    WITHIN,
    Cta,
    add,
    count,
    of_peer,
    sum_before_in_cta,
    sum_of_warp,
    synchronise,
)
from nvfp4_kernels.indexer.topk.tile import BINS, MAX_TIES

DIGIT = BINS.bit_length() - 1


@cute.jit
def narrow(
    cta: Cta,
    entries: Int32,
    low: Uint64,
    high: Uint64,
    hint: Uint64,
    need: Int32,
    turn: Int32 | int,
    cluster: cutlass.Constexpr,
) -> tuple[Uint64, Uint64, Int32, Int32]:
    """Finds the part of the interval that holds its key of rank ``need``; the greatest has rank 1.

    All threads of the cluster, or of the CTA, take part; buffers were written before the last
    barrier. If there are fewer keys than ``need``, which ``TOTAL`` tells, the result means nothing.

    Args:
        cta: this thread.
        entries: of the buffer.
        low: the interval's least key.
        high: its greatest.
        hint: the same, or a lower one that few keys exceed: they share the last bin.
        need: the rank.
        turn: the histogram to use, which nobody reads any more.
        cluster: CTAs whose buffers count: all of the cluster, or 1.

    Returns:
        The part's low, high and rank, and how many keys it holds.
    """
    shared, threads = cta.shared, cta.config.threads
    bins, histogram = BINS // threads, BINS * turn
    for n in cutlass.range_constexpr(bins):
        shared.histograms.store(Int32(0), histogram + cta.thread + n * threads)
    cta.meet()
    shift = _shift(hint - low)
    for at in range(cta.thread, entries, threads):
        distance = shared.buffer[at] - low
        if distance <= high - low:
            count(shared.histograms, histogram + _digit(distance, shift))
    synchronise(cta, cluster)
    mine = Int32(0)
    counted = []
    for n in cutlass.range_constexpr(bins):
        here, before = _over_cluster(cta, histogram + _bin(cta, n, bins), cluster)
        counted.append((here, before))
        mine += here
    above, total = sum_before_in_cta(cta, mine)
    for n in cutlass.range_constexpr(bins):
        here, before = counted[n]
        if (above < need) & (need <= above + here):
            shared.cells.store(_bin(cta, n, bins), BIN)
            shared.cells.store(here, WITHIN)
            shared.cells.store(above, ABOVE)
            shared.cells.store(before, BEFORE)
        above += here
    if cta.thread == 0:
        shared.cells.store(total, TOTAL)
        shared.cells.store(Int32(0), LISTED)
    cta.meet()
    found = shared.cells[BIN]
    part = low + (Uint64(found) << shift)
    rest = high - part
    width = (Uint64(1) << shift) - 1
    if (found < BINS - 1) & (width < rest):
        rest = width
    return part, part + rest, need - shared.cells[ABOVE], shared.cells[WITHIN]


@cute.jit
def settle(
    cta: Cta,
    entries: Int32,
    low: Uint64,
    high: Uint64,
    need: Int32,
    within: Int32,
    cluster: cutlass.Constexpr,
) -> Uint64:
    """The key itself, of an interval with at most ``MAX_TIES`` keys that ``narrow`` has found."""
    shared = cta.shared
    before = shared.cells[BEFORE]
    greater = Int32(0)
    for at in range(cta.thread, entries, cta.config.threads):
        key = shared.buffer[at]
        if key > high:
            greater += 1
        elif key >= low:
            slot = before + add(shared.cells, LISTED, 1)
            for rank in cutlass.range_constexpr(cluster):
                of_peer(shared.ties, rank, cluster).store(key, slot)
    if cutlass.const_expr(cluster > 1):
        greater = sum_of_warp(greater)
        if cta.lane < cluster and greater > 0:
            counts = of_peer(shared.greater, cta.lane, cluster)
            pointer = counts.data_ptr(cta.rank)
            ptx.red("add", "s32", pointer, greater, mem_order="relaxed", mem_scope="cluster")
    synchronise(cta, cluster)
    if cta.thread < within:
        mine = shared.ties[cta.thread]
        rank = Int32(1)
        for at in range(within):
            if shared.ties[at] > mine:
                rank += 1
        if rank == need:
            shared.threshold.store(mine)
    cta.meet()
    return shared.threshold[0]


@cute.jit
def select_in_cta(cta: Cta, entries: Int32, low: Uint64, high: Uint64, need: Int32) -> Uint64:
    """The key of rank ``need`` among those of this CTA's buffer, which are at least ``low``."""
    within = Int32(MAX_TIES + 1)
    while within > MAX_TIES:
        low, high, need, within = narrow(cta, entries, low, high, high, need, OF_CTA, 1)
    return settle(cta, entries, low, high, need, within, 1)


def _shift(span: Uint64) -> Uint64:
    """How many bits to drop so that what is up to ``span`` is a bin's number."""
    bits = 64 - cute.arch.clz(span).to(Int32)
    return Uint64(cutlass.max(bits - DIGIT, 0))


def _digit(distance: Uint64, shift: Uint64) -> Int32:
    bin = distance >> shift
    return Int32(cutlass.select_(bin < Uint64(BINS), bin, Uint64(BINS - 1)))


def _bin(cta: Cta, n: int, bins: int) -> Int32:
    """The ``n``-th bin of a thread; threads and their bins go down from the highest."""
    return BINS - 1 - n - cta.thread * bins


def _over_cluster(cta: Cta, index: Int32, cluster: int) -> tuple[Int32, Int32]:
    """The count of a bin over all CTAs that count, and over those of lower rank."""
    histograms = cta.shared.histograms
    if cluster == 1:
        return histograms[index], Int32(0)
    total, before = Int32(0), Int32(0)
    for rank in range(cluster):
        count = of_peer(histograms, rank, cluster)[index]
        total += count
        before += Int32(cutlass.select_(Boolean(cta.rank > rank), count, Int32(0)))
    return total, before
