"""Reading a slice, and keeping what may be among the best."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32, Uint64

from nvfp4_kernels.indexer.topk.keep import keep_best
from nvfp4_kernels.indexer.topk.keys import (
    ANY_COLUMN,
    LOWEST,
    column_of,
    key_of,
    known,
    order_of,
    value_before,
    value_of,
)
from nvfp4_kernels.indexer.topk.row import Row, load_element, load_quad
from nvfp4_kernels.indexer.topk.shared import (
    FILLED,
    OFFERED,
    Cta,
    add,
    sum_before,
)
from nvfp4_kernels.indexer.topk.tile import QUAD, QUADS, WARP

FIRST_BIT = 1 << 31  # of the elements that a lane looks at at a time


@cute.jit
def stream(cta: Cta, row: Row, low: Uint64, top_k: Int32) -> Int32:
    """Fills the buffer with the slice's keys from ``low`` on; returns how many there are.

    Should they be too many, the ``top_k`` best so far stay, and ``low`` rises to the last of them.
    All threads take part; the buffer may be read after it.
    """
    cells, config = cta.shared.cells, cta.config
    if cta.thread == 0:
        cells.store(Int32(0), OFFERED)
    cta.meet()
    if cta.warp == 0:
        _offer_ends(cta, row, low)
    quads = row.last - row.first
    batch, batches = cta.warp, cute.ceil_div(quads, WARP * QUADS)
    reading = Boolean(True)
    while reading:
        fits = Boolean(True)
        while (batch < batches) & fits:
            fits = _offer_batch(cta, row, batch * (WARP * QUADS) + cta.lane, low)
            if fits:
                batch += config.warps
        cta.meet()
        reading = cells[OFFERED] > config.buffer
        if reading:
            low = keep_best(cta, cells[FILLED], low, top_k)
    return cells[OFFERED]


@cute.jit
def _offer_ends(cta: Cta, row: Row, low: Uint64) -> None:
    """The elements before the first quad and behind the last: lanes 0 to 3, and 4 to 7."""
    column = cta.lane
    inside = (cta.rank == 0) & (column < row.head)
    if cta.lane >= QUAD:
        column = row.end + cta.lane - QUAD
        inside = (cta.rank == cta.config.cluster - 1) & (column < row.length)
    key = Uint64(0)
    if inside & (cta.lane < 2 * QUAD):
        key = key_of(load_element(row, column), column)
    hits = Uint32(cutlass.select_(key >= low, Uint32(FIRST_BIT), Uint32(0)))
    _offer(cta, row, column, hits)


@cute.jit
def _offer_batch(cta: Cta, row: Row, quad: Int32, low: Uint64) -> Boolean:
    """The batch that ``quad`` of the slice belongs to: this lane's first. Whether it had room."""
    values: list[Float32] = []
    left = row.last - row.first - quad
    for n in cutlass.range_constexpr(QUADS):
        values += load_quad(row, row.first + quad + n * WARP, left > n * WARP)
    bound, last_column = value_of(order_of(low)), column_of(low)
    hits = _above(values, value_before(order_of(low)))
    if bound == LOWEST:
        hits = Uint32(0xFFFFFFFF)  # NaN too, which is above nothing
    # Lanes in which quads are missing lack the last ones.
    have = cutlass.min(cutlass.max((left + WARP - 1) // WARP, 0), QUADS)
    if have < QUADS:
        hits &= ~(Uint32(0xFFFFFFFF) >> Uint32(QUAD * have))
    first = row.head + QUAD * (row.first + quad)
    if last_column != Uint32(ANY_COLUMN):
        for n in cutlass.range_constexpr(QUAD * QUADS):
            column = first + _offset(n)
            if (known(values[n]) == bound) & (column.bitcast(Uint32) > last_column):
                hits &= Uint32(0xFFFFFFFF ^ (FIRST_BIT >> n))
    return _offer(cta, row, first, hits)


def _above(values: list[Float32], bound: Float32) -> Uint32:
    """A bit for each value greater than ``bound``, the first the highest; none for NaN.

    The sign of a difference is that of the comparison, subnormal ones included, and NaN has none
    (PTX ISA, add). An addition and a funnel shift take half the ALU's time of comparing.
    """
    hits = Uint32(0)
    for value in values:
        hits = (hits << 1) | ((bound - value).bitcast(Uint32) >> 31)
    return hits


def _offset(n: Int32 | int) -> Int32 | int:
    """Columns from a lane's first element of a batch to its ``n``-th."""
    return n // QUAD * (QUAD * WARP) + n % QUAD


@cute.jit
def _offer(cta: Cta, row: Row, column: Int32, hits: Uint32) -> Boolean:
    """Appends the elements that have their bit set, those of the whole warp or none.

    Args:
        cta: this thread; those of a warp take part.
        row: theirs.
        column: of the lane's first element.
        hits: the highest bit is the first element's.

    Returns:
        Whether there was room.
    """
    shared, room = cta.shared, cta.config.buffer
    at, total = sum_before(cta, cute.arch.popc(hits).to(Int32))
    fits = Boolean(True)
    if total > 0:
        first = Int32(0)
        if cta.lane == 0:
            first = add(shared.cells, OFFERED, total)
        first = cute.arch.shuffle_sync(first, 0)
        fits = first + total <= room
        if fits:
            at += first
            # Few: reading them again takes less than finding them among registers.
            while hits != 0:
                n = cute.arch.clz(hits)
                hits ^= Uint32(FIRST_BIT) >> n
                hit = column + _offset(n.to(Int32))
                shared.buffer.store(key_of(load_element(row, hit), hit), at)
                at += 1
        elif (first <= room) & (cta.lane == 0):
            # Whoever came before has written below, nobody will write from here on.
            shared.cells.store(first, FILLED)
    return fits
