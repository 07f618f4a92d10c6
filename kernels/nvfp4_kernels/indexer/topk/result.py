"""Output of the selected columns, in ascending order."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Array, Int32, Uint32, Uint64
from cutlass.experimental import primitives as ptx

from nvfp4_kernels.indexer.topk.keys import column_of
from nvfp4_kernels.indexer.topk.row import RowSlice
from nvfp4_kernels.indexer.topk.shared import ThreadGroup, group_exclusive_sum, increment, warp_sum
from nvfp4_kernels.indexer.topk.tile import WARP


@dataclass(frozen=True)
class TopkResult:
    """Destination of the selected columns of a row.

    Attributes:
        indices: output row.
        ids: ids to write instead of column indices, or None.
    """

    indices: Array
    ids: Array | None

    def store(self, column: Int32, index: Int32) -> None:
        """Store a column, or the column's id, as the row's ``index``-th entry."""
        self.indices.store(column if self.ids is None else self.ids[column], index)


@cute.jit
def clear_bitmap(group: ThreadGroup, row: RowSlice) -> None:
    """Clear the slice's bitmap and ``counts``; a barrier must follow before ``write``."""
    threads = group.tile.threads
    group.shared.counts.store(Int32(0), group.thread)
    words = (row.last - row.first) // (WARP // 4) + 2
    for word in range(group.thread, words, threads):
        group.shared.bitmap.store(Uint32(0), word)


@cute.jit
def write(
    group: ThreadGroup,
    row: RowSlice,
    entries: Int32,
    threshold: Uint64,
    ties: Int32,
    result: TopkResult,
) -> None:
    """Write, in ascending order, the columns of the buffer's keys that are at least ``threshold``.

    Args:
        group: thread group; all its threads take part.
        row: slice of the row.
        entries: number of keys in the buffer.
        threshold: least selected key.
        ties: number of keys in ``ties`` of shared memory, used if the cluster has several CTAs.
        result: destination.
    """
    shared, tile = group.shared, group.tile
    for at in range(group.thread, entries, tile.threads):
        key = shared.buffer[at]
        if key >= threshold:
            set_bit(group, column_of(key).bitcast(Int32) - row.origin)
    group.sync()
    before, _ = group_exclusive_sum(group, shared.counts[group.thread])
    shared.counts.store(before + _before_slice(group, row, threshold, ties), group.thread)
    group.sync()
    for at in range(group.thread, entries, tile.threads):
        key = shared.buffer[at]
        if key >= threshold:
            column = column_of(key).bitcast(Int32)
            result.store(column, output_index(group, column - row.origin))


def set_bit(group: ThreadGroup, bit: Int32) -> None:
    """Set a selected column's bit, and count the column in its chunk."""
    word = bit // WARP
    address, flag = group.shared.bitmap.data_ptr(word), Int32(1) << bit % WARP
    ptx.red("or", "b32", address, flag, mem_order="relaxed", mem_scope="cta")
    increment(group.shared.counts, word // group.tile.chunk)


@cute.jit
def output_index(group: ThreadGroup, bit: Int32) -> Int32:
    """Number of selected columns before ``bit``; ``counts`` must already be the exclusive scan."""
    shared, chunk = group.shared, group.tile.chunk
    word = bit // WARP
    index = shared.counts[word // chunk]
    for earlier in range(word // chunk * chunk, word):
        index += cute.arch.popc(shared.bitmap[earlier]).to(Int32)
    below = (Uint32(1) << Uint32(bit % WARP)) - 1
    return index + cute.arch.popc(shared.bitmap[word] & below).to(Int32)


@cute.jit
def _before_slice(group: ThreadGroup, row: RowSlice, threshold: Uint64, ties: Int32) -> Int32:
    """Number of selected columns in the slices of CTAs of lower rank."""
    shared, before = group.shared, Int32(0)
    if cutlass.const_expr(group.tile.cluster > 1):
        if group.lane < group.rank:
            before = shared.greater[group.lane]
        for at in range(group.lane, ties, WARP):
            key = shared.ties[at]
            # Rank 0 has no columns before its slice; its head is left of ``origin + 4``.
            earlier = column_of(key).bitcast(Int32) < row.origin + 4
            if (key >= threshold) & earlier & (group.rank > 0):
                before += 1
        before = warp_sum(before)
    return before
