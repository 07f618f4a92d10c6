"""Making room among the candidates."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint64

from nvfp4_kernels.indexer.topk.keys import MOST
from nvfp4_kernels.indexer.topk.select import select_in_cta
from nvfp4_kernels.indexer.topk.shared import OFFERED, Cta, add, lanes_before, vote

TOGETHER = 4  # keys of a thread that it looks at between two barriers


@cute.jit
def keep_best(cta: Cta, entries: Int32, low: Uint64, top_k: Int32) -> Uint64:
    """Reduces the buffer to its ``top_k`` best keys; returns the last of them.

    Args:
        cta: this thread; all take part, and meet before what is kept is used.
        entries: of the buffer, more than ``top_k``; they were written before the last barrier.
        low: no key is less.
        top_k: keys to keep; ``OFFERED`` is as many then.
    """
    shared, threads = cta.shared, cta.config.threads
    least = select_in_cta(cta, entries, low, Uint64(MOST), top_k)
    if cta.thread == 0:
        shared.cells.store(Int32(0), OFFERED)
    for first in range(0, entries, TOGETHER * threads):
        keys = []
        for n in cutlass.range_constexpr(TOGETHER):
            at = first + n * threads + cta.thread
            key = Uint64(0)
            if at < entries:
                key = shared.buffer[at]
            keys.append(key)
        cta.meet()  # what follows overwrites no key that was not loaded
        votes = [vote(key >= least) for key in keys]
        total = sum(cute.arch.popc(kept).to(Int32) for kept in votes)
        place = Int32(0)
        if cta.lane == 0:
            place = add(shared.cells, OFFERED, total)
        place = cute.arch.shuffle_sync(place, 0)
        for n in cutlass.range_constexpr(TOGETHER):
            if keys[n] >= least:
                shared.buffer.store(keys[n], place + lanes_before(cta, votes[n]))
            place += cute.arch.popc(votes[n]).to(Int32)
    cta.meet()  # what is kept takes its room before anything new
    return least
