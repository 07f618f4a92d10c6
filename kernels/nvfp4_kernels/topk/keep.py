"""Making room among the candidates."""

import cutlass.cute as cute
from cutlass import Int32, Uint64

from nvfp4_kernels.topk.keys import MOST
from nvfp4_kernels.topk.select import select_in_cta
from nvfp4_kernels.topk.shared import OFFERED, Cta, add, lanes_before, vote


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
    for first in range(0, entries, threads):
        key = Uint64(0)
        if first + cta.thread < entries:
            key = shared.buffer[first + cta.thread]
        cta.meet()  # what follows overwrites no key that was not loaded
        kept = vote(key >= least)
        at = Int32(0)
        if cta.lane == 0:
            at = add(shared.cells, OFFERED, cute.arch.popc(kept))
        at = cute.arch.shuffle_sync(at, 0) + lanes_before(cta, kept)
        if key >= least:
            shared.buffer.store(key, at)
    cta.meet()  # what is kept takes its room before anything new
    return least
