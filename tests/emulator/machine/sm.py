"""SMs of the chip: room for CTAs, and the policy of sharing an SM."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from tests.emulator.findings import LaunchError
from tests.emulator.machine.limits import Limits
from tests.emulator.machine.residency import Floor, Needs, Room
from tests.emulator.memory.columns import Columns


@dataclass(frozen=True)
class Sharing:
    """Policy of sharing SMs among CTAs.

    Attributes:
        exclusive_permit: whether a CTA that has allocated tensor memory keeps the other CTAs of its
            SM from allocating until tcgen05.relinquish_alloc_permit or its exit, as NVIDIA's
            kernels assume. The PTX ISA says only that the CTA itself may allocate no more. A kernel
            should be right either way.
        registers: registers per thread, by kernel, as ptxas reports (-v). Other kernels use
            ``.maxnreg`` or, with setmaxnreg, the share that ``.maxntid`` and ``.minnctapersm``
            leave each thread (assumed); without these, registers do not limit residency.
        packed: whether a CTA goes to the fullest SM with room for one more CTA, instead of the
            emptiest SM: as on a chip that other work keeps busy.
    """

    exclusive_permit: bool = True
    registers: Mapping[str, int] = field(default_factory=dict)
    packed: bool = True


class Sm:
    """One streaming multiprocessor.

    Attributes:
        number: index on the chip.
        gpc: GPC of the SM.
        room: room for CTAs.
        columns: columns of tensor memory.
        launches: number of resident CTAs of each launch, by chain index.
    """

    def __init__(self, number: int, gpc: int, room: Room, columns: Columns) -> None:
        self.number = number
        self.gpc = gpc
        self.room = room
        self.columns = columns
        self.launches: Counter[int] = Counter()

    def start(self, number: int) -> Counter[int]:
        """Place a CTA of launch ``number`` on the SM; returns the other CTAs' count by launch."""
        before = self.launches.copy()
        self.launches[number] += 1
        return before


class Places(Protocol):
    """Interface of a set of SMs on which clusters are placed."""

    def take(self, size: int, needs: Needs) -> list[Sm] | None:
        """Take an SM for each CTA of a cluster; returns None while there is no room."""

    def give(self, sms: Iterable[Sm], needs: Needs) -> None:
        """Release a cluster's room."""


class Apart:
    """Placement of clusters on exclusive SMs, at most ``clusters`` at a time.

    Args:
        limits: limits of the chip.
        clusters: number of clusters that the chip holds.
    """

    def __init__(self, limits: Limits, clusters: int) -> None:
        self._limits = limits
        self._left = clusters
        self._number = 0

    def take(self, size: int, needs: Needs) -> list[Sm] | None:
        """Take an SM for each CTA of a cluster; returns None while there is no room."""
        if not self._left:
            return None
        self._left -= 1
        room = Room(self._limits)
        found = [Sm(self._number + n, 0, room, Columns()) for n in range(size)]
        self._number += size
        return found

    def give(self, sms: Iterable[Sm], needs: Needs) -> None:
        """Release a cluster's room."""
        self._left += 1


def shared_floor(limits: Limits, sharing: Sharing, largest: int) -> Floor[Sm]:
    """Floor with all SMs of a chip.

    Args:
        limits: limits of the chip.
        sharing: policy of SM sharing.
        largest: number of CTAs of the largest cluster.

    Raises:
        LaunchError: no GPC holds the largest cluster.
    """
    sizes = limits.gpc_sizes()
    if largest > max(sizes):
        raise LaunchError(
            f"cluster: {largest} CTAs, a GPC has {max(sizes)} SMs and must hold all of them; "
            "launch smaller clusters"
        )
    homes = [gpc for gpc, count in enumerate(sizes) for _ in range(count)]
    return Floor(
        [
            Sm(number, gpc, Room(limits), Columns(sharing.exclusive_permit))
            for number, gpc in enumerate(homes)
        ],
        sharing.packed,
    )
