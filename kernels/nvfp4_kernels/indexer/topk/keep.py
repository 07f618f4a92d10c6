"""Compaction of a buffer of candidates to the top-k."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint64

from nvfp4_kernels.indexer.topk.keys import MAX_KEY
from nvfp4_kernels.indexer.topk.select import select_in_group
from nvfp4_kernels.indexer.topk.shared import (
    APPENDED,
    ThreadGroup,
    ballot,
    count_lanes_before,
    fetch_add,
)

UNROLL = 4  # keys of a thread between two barriers


@cute.jit
def keep_best(group: ThreadGroup, entries: Int32, low: Uint64, top_k: Int32) -> Uint64:
    """Reduce the buffer to its ``top_k`` greatest keys; return the least key kept.

    Args:
        group: thread group, all threads of which take part; the buffer may be read afterwards.
        entries: number of keys in the buffer, more than ``top_k``; the keys must have been written
            before the last barrier.
        low: lower bound on the keys.
        top_k: number of keys to keep; the counter ``APPENDED`` becomes ``top_k``.
    """
    shared, threads = group.shared, group.tile.threads
    threshold = select_in_group(group, entries, low, Uint64(MAX_KEY), top_k)
    if group.thread == 0:
        shared.counters.store(Int32(0), APPENDED)
    for first in range(0, entries, UNROLL * threads):
        keys = []
        for n in cutlass.range_constexpr(UNROLL):
            at = first + n * threads + group.thread
            key = Uint64(0)
            if at < entries:
                key = shared.buffer[at]
            keys.append(key)
        group.sync()  # all keys are loaded before any is overwritten
        votes = [ballot(key >= threshold) for key in keys]
        total = sum(cute.arch.popc(kept).to(Int32) for kept in votes)
        position = Int32(0)
        if group.lane == 0:
            position = fetch_add(shared.counters, APPENDED, total)
        position = cute.arch.shuffle_sync(position, 0)
        for n in cutlass.range_constexpr(UNROLL):
            if keys[n] >= threshold:
                shared.buffer.store(keys[n], position + count_lanes_before(group, votes[n]))
            position += cute.arch.popc(votes[n]).to(Int32)
    group.sync()  # the best are stored before anything is appended
    return threshold
