"""What every warp did, in its own order: the input of the timing model.

A warp's trace is a list of basic block numbers and of events. Events follow the block they happened
in, in program order, and name the PTX line; an instruction that no lane ran leaves none.
"""

from dataclasses import dataclass
from typing import NamedTuple

Key = tuple[object, ...]


class Event(NamedTuple):
    """Something that takes part in timing beyond an instruction's issue.

    Attributes:
        kind: one of
            "init" (an mbarrier: key, amount = its arrival count),
            "wait" (an mbarrier's phase: key, amount = phase that must have completed, from 0),
            "arrive" (key, amount = count), "expect" (key, amount = bytes),
            "copy" (a bulk copy into shared memory: amount = bytes read, detail = (path, keys of the
            mbarriers it completes on, bytes per destination)),
            "store" (a bulk copy out of it: amount = bytes, key = its group),
            "wait_group" (key = the warp's groups, amount = last group waited for,
            detail = "reads" or "writes"),
            "mma" (detail = (kind, M, N, K, CTAs, scale blocks, A in tensor memory)),
            "tensor_copy" (amount = bytes), "commit" (detail = keys of the mbarriers),
            "tensor_load", "tensor_store" (amount = 32-bit registers per thread, detail = shape),
            "tensor_wait" (detail = "loads" or "stores"),
            "barrier" (key, amount = generation, detail = "sync" or "arrive"),
            "cluster_arrive", "cluster_wait" (key, amount = generation),
            "read", "write", "atomic" (generic proxy: amount = bytes, detail = (space, lanes,
            passes): 32-byte sectors of global memory, turns at the banks of shared memory),
            "launch_control" (key = the mbarrier).
        line: PTX line.
        key: what other warps' events about the same thing share.
        amount: see ``kind``.
        detail: see ``kind``.
    """

    kind: str
    line: int
    key: Key = ()
    amount: int = 0
    detail: object = None


WarpTrace = list[int | Event]


@dataclass(frozen=True)
class CtaTrace:
    """One CTA's warps.

    Attributes:
        position: in the grid.
        cluster: number of its cluster; CTAs of one cluster run together.
        rank: in the cluster.
        warps: their traces, by warp index.
    """

    position: tuple[int, int, int]
    cluster: int
    rank: int
    warps: list[WarpTrace]
