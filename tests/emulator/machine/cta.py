"""CTAs and clusters: the state that the warps of a CTA or cluster share."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from tests.emulator.findings import (
    BarrierMisuse,
    ExitedPeer,
    LateInitialisation,
    OutOfBounds,
    RegisterBudget,
    UnfinishedStore,
    Where,
)
from tests.emulator.machine.sm import Sm
from tests.emulator.machine.units import Units
from tests.emulator.machine.warp import RANK_SHIFT, Warp
from tests.emulator.machine.warpgroup import Warpgroup
from tests.emulator.memory.clocks import MBARRIER, Clock, join
from tests.emulator.memory.linear import LinearMemory
from tests.emulator.memory.tensor import TensorMemory
from tests.emulator.ptx.shared_arrays import between
from tests.emulator.sync.barrier import Barrier, ClusterBarrier
from tests.emulator.sync.mbarrier import MBarrier

if TYPE_CHECKING:
    from tests.emulator.machine.launch import Launch

# The first kilobyte belongs to the system on sm_90 and later. Kernels clear bit 24 of a shared
# address, the lowest bit of the rank, to name the leader of a pair.
SHARED_BASE = 1024

Position = tuple[int, int, int]


class Cta:
    """One thread block.

    Attributes:
        position: %ctaid.
        rank: rank in the cluster.
        sm: SM of the CTA.
        released: whether the CTA has let dependent launches start.
        shared: shared memory.
        tensor: tensor memory.
        barriers: CTA barriers by number.
        mbarriers: live mbarrier objects by shared address.
        warpgroups: warpgroups that issue wgmma, by first warp.
        start: component of the CTA's start, known to all events after it; 0 if the CTA has no peer.
        touches: clock, verb and place of the last access to the CTA by each component other than
            the CTA's warps; the CTA may exit only after these accesses.
    """

    def __init__(self, cluster: "Cluster", position: Position, rank: int, sm: Sm) -> None:
        launch = cluster.launch
        self.sm = sm
        self.released = False
        self.cluster = cluster
        self.launch = launch
        self.gpu = launch.gpu
        self.position = position
        self.rank = rank
        self.threads = launch.threads
        self.alive = True
        # A few chunks beyond the CTA's memory: descriptors address units of 16 bytes.
        whole = np.zeros(SHARED_BASE + -(-launch.memory_bytes // 16) * 16, np.uint8)
        self.shared = LinearMemory(
            f"shared memory of CTA {position}",
            SHARED_BASE | rank << RANK_SHIFT,
            whole[SHARED_BASE : SHARED_BASE + launch.memory_bytes],
            launch.program.granule,
            kind="shared",
            whole=whole,
        )
        program = launch.program
        if program.shared_arrays:
            describe = functools.partial(between, program.shared_arrays)
            self.shared.shadow.guard(program.guards, describe)
        self.tensor = TensorMemory(self, sm.columns)
        self.barriers: dict[int, Barrier] = {}
        self.mbarriers: dict[int, MBarrier] = {}
        self.warpgroups: dict[int, Warpgroup] = {}
        self.start: int = launch.events.new_component() if launch.cluster != (1, 1, 1) else 0
        self.touches: dict[int, tuple[int, str, Callable[[], Where]]] = {}
        self._exit: Clock = {}  # clocks of the warps at their exit
        self._executed: Clock = {}  # executed accesses at exit, by negated component
        self.warps = [Warp(self, index) for index in range(-(-launch.threads // 32))]
        self.running = len(self.warps)
        self.registers: dict[int, int] = {}
        self.register_changes: dict[int, list[int]] = {}

    @property
    def name(self) -> str:
        return f"CTA {self.position} of {self.launch.program.kernel.name}"

    def barrier(self, number: int) -> Barrier:
        if not 0 <= number < 16:
            raise BarrierMisuse(f"barrier {number}: a CTA has barriers 0 to 15")
        found = self.barriers.get(number)
        if found is None:
            found = self.barriers[number] = Barrier(f"barrier {number} of CTA {self.position}")
        return found

    def warpgroup(self, warp: int) -> Warpgroup:
        """The warpgroup of a warp."""
        first = warp & ~3
        found = self.warpgroups.get(first)
        if found is None:
            found = self.warpgroups[first] = Warpgroup(self, first)
        return found

    def mbarrier(self, address: int) -> MBarrier:
        """The live mbarrier at a shared address of this CTA."""
        found = self.mbarriers.get(address)
        if found is None:
            near = ", ".join(f"{a:#x}" for a in sorted(self.mbarriers)[:16])
            raise BarrierMisuse(
                f"no live mbarrier at shared {address:#x} of CTA {self.position}"
                + (f"; live ones: {near}" if near else "; none was initialised")
            )
        return found

    def new_mbarrier(self, address: int, count: int, warp: Warp, line: int) -> None:
        """mbarrier.init: make an mbarrier at a shared address."""
        if address % 8:
            raise BarrierMisuse(f"mbarrier.init at {address:#x}: must be a multiple of 8")
        memory = self.shared
        granules = slice(
            (address - memory.base) // memory.granule, (address + 8 - memory.base) // memory.granule
        )
        if not memory.contains(address) or not memory.contains(address + 7):
            raise OutOfBounds(f"mbarrier.init at {address:#x}: outside of {memory.name}")
        if address in self.mbarriers:
            self.launch.report(
                BarrierMisuse(
                    f"mbarrier.init of a live {self.mbarriers[address]}; mbarrier.inval first, and "
                    "one lane only"
                )
            )
        else:
            memory.shadow.order(granules, warp.access(line, "write"))
        busy = next((each for each in self.mbarriers.values() if each.is_underway), None)
        if busy is not None and not self.launch.program.module.target.startswith("sm_90"):
            self.launch.report(
                LateInitialisation(
                    f"mbarrier.init at shared {address:#x} beside a {busy}; initialise all "
                    "mbarriers of the CTA before any is used"
                )
            )
        actor = warp.actor
        component = self.launch.events.new_component()
        self.mbarriers[address] = MBarrier(
            address, count, component, (actor.component, actor.now), self.launch.report
        )
        warp.note("init", line, self.mbarriers[address].key, count)
        memory.shadow.mark(granules, MBARRIER)

    def invalidate_mbarrier(self, address: int, warp: Warp, line: int) -> None:
        """mbarrier.inval: turn the bytes into ordinary, uninitialised memory."""
        self.mbarrier(address)
        del self.mbarriers[address]
        memory = self.shared
        start = (address - memory.base) // memory.granule
        event = warp.access(line, "write").event
        memory.shadow.mark(slice(start, start + 8 // memory.granule), event)

    def set_registers(self, warp: Warp, count: int, more: bool) -> None:
        """setmaxnreg: check that the sum over all warps stays within the register file."""
        self.registers[warp.index] = count
        self.register_changes.setdefault(warp.index, []).append(count)
        total = sum(self.registers.values()) * 32
        limit = self.gpu.limits.registers
        if more and len(self.registers) == len(self.warps) and total > limit:
            self.launch.report(
                RegisterBudget(
                    f"setmaxnreg.inc {count}: the warps would hold {total} registers of {limit}"
                )
            )

    def _check_register_changes(self) -> None:
        """Check that all warps of a warpgroup execute the same setmaxnreg (PTX ISA, setmaxnreg)."""
        for first in range(0, len(self.warps), 4):
            group = range(first, min(first + 4, len(self.warps)))
            changes = [self.register_changes.get(index, []) for index in group]
            if any(change != changes[0] for change in changes):
                self.launch.report(
                    RegisterBudget(
                        f"setmaxnreg in warps {list(group)} of CTA {self.position}: {changes}; all "
                        "warps of a warpgroup must execute the same"
                    )
                )

    def touch(self, component: int, clock: int, verb: str, where: Callable[[], Where]) -> None:
        """Note an access that a peer or an asynchronous unit makes to this CTA now."""
        self.touches[component] = clock, verb, where
        if not self.alive:
            self.launch.report(
                ExitedPeer(
                    f"{verb} of CTA {self.position} after that CTA has exited; a cluster barrier "
                    "before its exit is missing",
                    where(),
                )
            )

    def _check_touches(self) -> None:
        """Report every access to this CTA that may come after its last warp exits."""
        for component, (clock, verb, where) in self.touches.items():
            known = self._exit.get(component, 0)
            if verb == "generic read":
                # A warp that uses the read data arrives later, whatever the memory order.
                known = max(known, self._executed.get(-component, 0))
            if known < clock:
                self.launch.report(
                    ExitedPeer(
                        f"{verb} of CTA {self.position}: nothing orders it before the exit of that "
                        "CTA; a barrier of the cluster, or a wait for it, is missing there",
                        where(),
                    )
                )

    def warp_exited(self, warp: Warp) -> None:
        self.running -= 1
        clocks = warp.actor.clocks
        for view in (clocks.generic, clocks.tensor):
            join(self._exit, view)
        join(self._executed, clocks.inits)
        if self.launch.program.tuples.of and warp.index & ~3 in self.warpgroups:
            warp.part.leave()
        self.cluster.barrier.leave()
        for barrier in self.barriers.values():
            barrier.leave(32)
        if self.running == 0:
            self._check_register_changes()
            self._check_touches()
            self.cluster.cta_exited(self)


class Cluster:
    """CTAs that share a cluster barrier and can access one another's shared memory.

    Args:
        launch: launch of the cluster.
        number: index in the grid.
        sms: SM of each CTA.
    """

    def __init__(self, launch: "Launch", number: int, sms: list[Sm]) -> None:
        self.launch = launch
        self.number = number
        self.sms = sms
        shape, grid = launch.cluster, launch.grid
        across = [grid[axis] // shape[axis] for axis in range(3)]
        x = number % across[0]
        y = number // across[0] % across[1]
        z = number // (across[0] * across[1])
        self.position: Position = (x, y, z)
        self.units = Units(launch.schedule)
        self.ready: list[Warp] = []
        per_cta = -(-launch.threads // 32)
        size = shape[0] * shape[1] * shape[2]
        self.barrier = ClusterBarrier(per_cta * size)
        self.ctas = []
        for rank in range(size):
            inside = (
                rank % shape[0],
                rank // shape[0] % shape[1],
                rank // (shape[0] * shape[1]),
            )
            position = tuple(self.position[a] * shape[a] + inside[a] for a in range(3))
            self.ctas.append(Cta(self, position, rank, sms[rank]))  # type: ignore[arg-type]
        self.alive = size
        late = launch.schedule.late_cta
        self._late = self.ctas[late % size].warps if late is not None and size > 1 else []
        self.ready = [warp for cta in self.ctas for warp in cta.warps if warp not in self._late]
        self.starved = launch.schedule.starved_of([w for cta in self.ctas for w in cta.warps])

    def start_late(self) -> bool:
        """Start the CTA held back by the schedule; returns False if there is none."""
        self.ready += self._late
        late, self._late = self._late, []
        return bool(late)

    def peer(self, rank: int, address: int = 0) -> Cta:
        if not 0 <= rank < len(self.ctas):
            raise OutOfBounds(
                f"shared::cluster address {address:#x} names CTA rank {rank} of a cluster of "
                f"{len(self.ctas)}"
            )
        return self.ctas[rank]

    def cta_exited(self, cta: Cta) -> None:
        self.units_done_for(cta)
        cta.tensor.check_freed(cta, self.launch.report)
        self.launch.link.release(cta)
        cta.alive = False
        self.alive -= 1

    def units_done_for(self, cta: Cta) -> None:
        """Report bulk copies that still read the shared memory of an exiting CTA."""
        for warp in cta.warps:
            if "bulk_groups" in warp.__dict__ and warp.bulk_groups.unread():
                self.launch.report(
                    UnfinishedStore(
                        f"{warp.name} exits while bulk stores still read its shared memory; "
                        "cp.async.bulk.wait_group.read before the exit is missing",
                        warp.bulk_groups.oldest(),
                    )
                )

    def state(self) -> list[str]:
        """Lines of a deadlock report: waiting warps, live mbarriers, barriers with arrivals."""
        lines = []
        for cta in self.ctas:
            for warp in cta.warps:
                if not warp.exited and warp.waits_for is not None:
                    place = f"{self.launch.label}{warp.where(warp.line())}"
                    lines.append(f"{place}\n    waits for {warp.waits_for()}")
        for cta in self.ctas:
            for address in sorted(cta.mbarriers):
                lines.append(f"{self.launch.label}CTA {cta.position} {cta.mbarriers[address]}")
            lines += [str(b) for b in cta.barriers.values() if b.arrived]
        if self.barrier.arrived:
            lines.append(str(self.barrier))
        return lines
