"""Writing what is chosen, in the order of columns."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Int32, Uint32, Uint64
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.indexer.topk.keys import column_of
from nvfp4_kernels.indexer.topk.row import Row
from nvfp4_kernels.indexer.topk.shared import Cta, count, sum_before_in_cta, sum_of_warp
from nvfp4_kernels.indexer.topk.tile import WARP


@dataclass(frozen=True)
class Result:
    """Where the chosen columns of a row go.

    Attributes:
        indices: of the row.
        names: what its columns are called there; None: as they are counted.
    """

    indices: Array
    names: Array | None

    def put(self, column: Int32, place: Int32) -> None:
        name = column if self.names is None else self.names[column]
        self.indices.store(name, place)


@cute.jit
def clear_bitmap(cta: Cta, row: Row) -> None:
    """Of the slice's columns; a barrier must come between this and ``write``."""
    threads = cta.config.threads
    cta.shared.counts.store(Int32(0), cta.thread)
    words = (row.last - row.first) // (WARP // 4) + 2
    for word in range(cta.thread, words, threads):
        cta.shared.bitmap.store(Uint32(0), word)


@cute.jit
def write(cta: Cta, row: Row, entries: Int32, least: Uint64, ties: Int32, result: Result) -> None:
    """The columns of the buffer's keys from ``least`` on, to their places in ``result``.

    Args:
        cta: this thread; all take part.
        row: theirs.
        entries: of the buffer.
        least: the last key that is chosen.
        ties: how many keys the cluster has listed.
        result: of the row.
    """
    shared, config = cta.shared, cta.config
    for at in range(cta.thread, entries, config.threads):
        key = shared.buffer[at]
        if key >= least:
            mark(cta, column_of(key).bitcast(Int32) - row.origin)
    cta.meet()
    before, _ = sum_before_in_cta(cta, shared.counts[cta.thread])
    shared.counts.store(before + _before_slice(cta, row, least, ties), cta.thread)
    cta.meet()
    for at in range(cta.thread, entries, config.threads):
        key = shared.buffer[at]
        if key >= least:
            column = column_of(key).bitcast(Int32)
            result.put(column, place_of(cta, column - row.origin))


def mark(cta: Cta, bit: Int32) -> None:
    """Chooses the column of ``bit``, and counts it to its chunk."""
    word = bit // WARP
    place, flag = cta.shared.bitmap.data_ptr(word), Int32(1) << bit % WARP
    ptx.red("or", "b32", place, flag, mem_order="relaxed", mem_scope="cta")
    count(cta.shared.counts, word // cta.config.chunk)


@cute.jit
def place_of(cta: Cta, bit: Int32) -> Int32:
    """How many chosen columns are before that of ``bit``, once ``counts`` tell those of chunks."""
    shared, chunk = cta.shared, cta.config.chunk
    word = bit // WARP
    place = shared.counts[word // chunk]
    for earlier in range(word // chunk * chunk, word):
        place += cute.arch.popc(shared.bitmap[earlier]).to(Int32)
    below = (Uint32(1) << Uint32(bit % WARP)) - 1
    return place + cute.arch.popc(shared.bitmap[word] & below).to(Int32)


@cute.jit
def _before_slice(cta: Cta, row: Row, least: Uint64, ties: Int32) -> Int32:
    """How many chosen columns are in slices of lower rank."""
    shared, mine = cta.shared, Int32(0)
    if cutlass.const_expr(cta.config.cluster > 1):
        if cta.lane < cta.rank:
            mine = shared.greater[cta.lane]
        for at in range(cta.lane, ties, WARP):
            key = shared.ties[at]
            # Nothing of rank 0 is before its slice; its head is left of ``origin + 4``.
            earlier = column_of(key).bitcast(Int32) < row.origin + 4
            if (key >= least) & earlier & (cta.rank > 0):
                mine += 1
        mine = sum_of_warp(mine)
    return mine
