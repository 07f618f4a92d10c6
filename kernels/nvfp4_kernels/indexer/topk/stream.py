"""Streaming of a slice through registers; candidates are appended to the buffer."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32, Uint64

from nvfp4_kernels.indexer.topk.keep import keep_best
from nvfp4_kernels.indexer.topk.keys import (
    ANY_COLUMN,
    LOWEST,
    column_of,
    key_of,
    nan_to_lowest,
    order_of,
    value_before,
    value_of,
)
from nvfp4_kernels.indexer.topk.row import RowSlice, load_element, load_quad
from nvfp4_kernels.indexer.topk.shared import (
    APPENDED,
    FILLED,
    ThreadGroup,
    fetch_add,
    warp_exclusive_sum,
)
from nvfp4_kernels.indexer.topk.tile import QUAD, QUADS, WARP

FIRST_BIT = 1 << 31  # of a lane's elements of a batch, the highest is the first


@cute.jit
def stream(group: ThreadGroup, row: RowSlice, low: Uint64, top_k: Int32) -> Int32:
    """Fill the buffer with the slice's keys that are at least ``low``; return the number of keys.

    If the buffer fills up, only the top-k so far are kept, and ``low`` rises to the least key kept.
    All threads take part; the buffer may be read afterwards.
    """
    counters, tile = group.shared.counters, group.tile
    if group.thread == 0:
        counters.store(Int32(0), APPENDED)
    group.sync()
    if group.warp == 0:
        _append_ends(group, row, low)
    quads = row.last - row.first
    batch, batches = group.warp, cute.ceil_div(quads, WARP * QUADS)
    reading = Boolean(True)
    while reading:
        fits = Boolean(True)
        while (batch < batches) & fits:
            fits = _append_batch(group, row, batch * (WARP * QUADS) + group.lane, low)
            if fits:
                batch += tile.warps
        group.sync()
        reading = counters[APPENDED] > tile.capacity
        if reading:
            low = keep_best(group, counters[FILLED], low, top_k)
    return counters[APPENDED]


@cute.jit
def _append_ends(group: ThreadGroup, row: RowSlice, low: Uint64) -> None:
    """Append the row's candidates before the first quad and after the last quad.

    Lanes 0 to 3 of the first CTA load the elements before, and lanes 4 to 7 of the last CTA the
    elements after.
    """
    column = group.lane
    inside = (group.rank == 0) & (column < row.head)
    if group.lane >= QUAD:
        column = row.end + group.lane - QUAD
        inside = (group.rank == group.tile.cluster - 1) & (column < row.length)
    key = Uint64(0)
    if inside & (group.lane < 2 * QUAD):
        key = key_of(load_element(row, column), column)
    hits = Uint32(cutlass.select_(key >= low, Uint32(FIRST_BIT), Uint32(0)))
    _append(group, row, column, hits)


@cute.jit
def _append_batch(group: ThreadGroup, row: RowSlice, quad: Int32, low: Uint64) -> Boolean:
    """Append all or none of the candidates in a batch of 1024 elements; return whether all fit.

    ``quad``: index, in the slice, of this lane's first quad of the batch.
    """
    values: list[Float32] = []
    left = row.last - row.first - quad
    for n in cutlass.range_constexpr(QUADS):
        values += load_quad(row, row.first + quad + n * WARP, left > n * WARP)
    bound, last_column = value_of(order_of(low)), column_of(low)
    hits = _above(values, value_before(order_of(low)))
    if bound == LOWEST:
        hits = Uint32(0xFFFFFFFF)  # NaN included, which compares as not greater
    # A lane at the end of the slice lacks its last quads.
    have = cutlass.min(cutlass.max((left + WARP - 1) // WARP, 0), QUADS)
    if have < QUADS:
        hits &= ~(Uint32(0xFFFFFFFF) >> Uint32(QUAD * have))
    first = row.head + QUAD * (row.first + quad)
    if last_column != Uint32(ANY_COLUMN):
        for n in cutlass.range_constexpr(QUAD * QUADS):
            column = first + _offset(n)
            if (nan_to_lowest(values[n]) == bound) & (column.bitcast(Uint32) > last_column):
                hits &= Uint32(0xFFFFFFFF ^ (FIRST_BIT >> n))
    return _append(group, row, first, hits)


def _above(values: list[Float32], bound: Float32) -> Uint32:
    """Mask of the values greater than ``bound``, the first value's bit highest; 0 for NaN.

    The sign bit of ``bound − value`` is the result of the comparison, even for subnormals, and is
    clear for NaN (PTX ISA, add). An addition and a funnel shift take half the ALU time of a
    comparison.
    """
    hits = Uint32(0)
    for value in values:
        hits = (hits << 1) | ((bound - value).bitcast(Uint32) >> 31)
    return hits


def _offset(n: Int32 | int) -> Int32 | int:
    """Offset in columns from a lane's first element of a batch to the lane's ``n``-th element."""
    return n // QUAD * (QUAD * WARP) + n % QUAD


@cute.jit
def _append(group: ThreadGroup, row: RowSlice, column: Int32, hits: Uint32) -> Boolean:
    """Append the elements whose bits in ``hits`` are set, either all of the warp's or none.

    Args:
        group: thread group; whole warps take part.
        row: slice of the row.
        column: column of the lane's first element.
        hits: mask of the lane's elements, the first element's bit highest.

    Returns:
        Whether the elements fit in the buffer.
    """
    shared, capacity = group.shared, group.tile.capacity
    at, total = warp_exclusive_sum(group, cute.arch.popc(hits).to(Int32))
    fits = Boolean(True)
    if total > 0:
        first = Int32(0)
        if group.lane == 0:
            first = fetch_add(shared.counters, APPENDED, total)
        first = cute.arch.shuffle_sync(first, 0)
        fits = first + total <= capacity
        if fits:
            at += first
            # Candidates are few: loading them again is faster than selecting registers dynamically.
            while hits != 0:
                n = cute.arch.clz(hits)
                hits ^= Uint32(FIRST_BIT) >> n
                hit = column + _offset(n.to(Int32))
                shared.buffer.store(key_of(load_element(row, hit), hit), at)
                at += 1
        elif (first <= capacity) & (group.lane == 0):
            # Warps that appended earlier have written up to here; later warps write nothing.
            shared.counters.store(first, FILLED)
    return fits
