"""Record of every warp's work, in program order: the input of the timing model.

A warp's trace is a list of basic block numbers and of events. Events follow their block, in program
order, and name the PTX line; an instruction that no lane executed leaves no event.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from tests.emulator.tma.tile import Footprint

SECTOR = 32  # bytes of global memory that move together
Key = tuple[object, ...]
Touched: TypeAlias = "tuple[tuple[int, int] | Footprint, ...]"


class Event(NamedTuple):
    """Event that affects timing beyond the issue of an instruction.

    Attributes:
        kind: one of
            "init" (an mbarrier: key, amount = its arrival count),
            "wait" (an mbarrier's phase: key, amount = phase that must have completed, from 0,
            detail = whether the phase was complete when the wait ended),
            "arrive" (key, amount = count), "expect" (key, amount = bytes),
            "drop" (arrive_drop: key, amount = count),
            "complete" (complete_tx: key, amount = bytes),
            "copy" (a bulk copy into shared memory: amount = bytes read, detail = (path, keys of the
            mbarriers that the copy completes on, bytes per destination); of a tensor copy key = the
            tensor map),
            "map" (prefetch.tensormap: key = the tensor map),
            "store" (a bulk copy out of shared memory: amount = bytes, key = the bulk group),
            "async_copy" (cp.async: amount = bytes, key = the group, detail = (lanes, sectors read,
            passes over shared memory's banks, tags)),
            "wait_group" (key = the warp's groups, amount = last group waited for,
            detail = "reads" or "writes"),
            "async_arrive" (cp.async.mbarrier.arrive: key, amount = arrivals, detail = whether the
            phase's arrival count includes them already),
            "prefetch" (to L2: amount = bytes),
            "mma" (detail = (kind, M, N, K, CTAs, scale blocks, A in tensor memory)),
            "tensor_alloc" (amount = columns, detail = CTAs), "tensor_free" (amount = columns),
            "tensor_copy" (amount = bytes, detail = CTAs),
            "commit" (detail = keys of the mbarriers),
            "tensor_load", "tensor_store" (amount = 32-bit registers per thread, detail = shape),
            "tensor_wait" (detail = "loads" or "stores"),
            "barrier" (key, amount = generation, detail = "sync" or "arrive"),
            "cluster_arrive", "cluster_wait" (key, amount = generation),
            "read", "write", "atomic" (generic proxy: amount = bytes, detail = (space, lanes,
            passes, tags): 32-byte sectors and 128-byte lines of global memory; turns at the banks
            of shared memory; space "peer": shared memory of another CTA),
            "launch_control" (key = the mbarrier),
            "dependency" (griddepcontrol: detail = "wait" or "launch_dependents"),
            "warpgroup_mma" (a warp's part of a wgmma: detail = (N, K, A in registers)),
            "warpgroup_commit", "warpgroup_wait" (amount = groups that may still be in flight).
        line: PTX line.
        key: identity of the object, shared with events of other warps about the same object.
        amount: see ``kind``.
        detail: see ``kind``.
        where: ranges of global memory read: runs of sectors (first, count), or the regions of a
            tensor copy.
    """

    kind: str
    line: int
    key: Key = ()
    amount: int = 0
    detail: object = None
    where: Touched = ()


WarpTrace = list[int | Event]


@dataclass(frozen=True)
class CtaTrace:
    """Traces of one CTA's warps.

    Attributes:
        position: position in the grid.
        cluster: number of the cluster; CTAs of one cluster run together.
        rank: rank in the cluster.
        warps: traces by warp index.
    """

    position: tuple[int, int, int]
    cluster: int
    rank: int
    warps: list[WarpTrace]
