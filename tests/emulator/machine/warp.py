"""A warp: 32 lanes, the state of one program counter, and links to the rest of the machine."""

import functools
import re
from collections.abc import Callable, Hashable, Sequence
from types import GeneratorType
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from tests.emulator.findings import (
    DivergentExecution,
    EmulatorError,
    UninitialisedRead,
    UnstartedPeer,
    Where,
)
from tests.emulator.machine.bulk_groups import BulkGroups
from tests.emulator.machine.tensor_unit import TensorUnit
from tests.emulator.machine.trace import Event, Key, Touched, WarpTrace
from tests.emulator.machine.warpgroup_part import WarpgroupPart
from tests.emulator.memory.clocks import Actor, Clocks, Origin
from tests.emulator.memory.published import Place, poll_key
from tests.emulator.memory.shadow import Access, OneLane

if TYPE_CHECKING:
    from tests.emulator.machine.cta import Cta
    from tests.emulator.machine.launch import Launch

LANES = 32
_POLLS = 3  # loads of the same value before a warp sleeps
_REMEMBERED = 64  # accesses not yet followed by a bar.warp.sync; older accesses count as released
RANK_SHIFT = 24  # a shared address carries the rank of its CTA in the cluster above this bit
Mask = npt.NDArray[np.bool_] | None
Program: TypeAlias = "GeneratorType[None, None, None]"


class Warp:
    """One warp of a CTA.

    Attributes:
        cta: CTA of the warp.
        index: index in the CTA.
        live: mask of the lanes that exist and have not exited.
        actor: clocks of the warp.
        jitter: whether the schedule may preempt the warp at synchronisation points.
        waits_for: description of the event the warp is blocked on, for reports.
        gave_up: the mbarrier.try_wait that has just given up; only a second try in a row sleeps.
        limited: whether the warp sleeps in a wait that has a time limit.
        timed_out: whether the wait ended by its time limit.
        unordered: writes to shared memory that other lanes may not see before a bar.warp.sync, with
            the lanes that have not released the write, as bits; -1 for all lanes.
        unordered_reads: likewise, reads of shared memory that other lanes may not overwrite yet.
        unreleased: likewise, accesses to shared memory and writes to global memory that a release
            by other lanes does not cover.
        phases: by component of an mbarrier, number of phases known to be complete from the warp's
            own arrivals and waits.
        blocks_run: number of executions of each basic block.
        trace: record of the warp's work, or None where the launch is not traced.
        bulk_groups, copy_groups: groups of cp.async.bulk and of cp.async.
        tensor: the warp's side of the tensor core of sm_100.
        part: the warp's part in the wgmma of its warpgroup.
        local: local memory of each lane.
    """

    def __init__(self, cta: "Cta", index: int) -> None:
        self.cta = cta
        self.gpu = cta.gpu
        self.launch: Launch = cta.launch
        self.index = index
        threads = min(LANES, cta.threads - index * LANES)
        self.live = np.arange(LANES) < threads
        self.actor = Actor(cta.launch.events, cta.gpu.strict_tensor_fences)
        for component in cta.launch.known:
            self.actor.finished(component, 1)
        if cta.start:
            self.actor.clocks.inits[cta.start] = 1
        self.jitter = cta.launch.schedule.warps == "random"
        self.ready = True
        self.waits_for: Callable[[], str] | None = None
        self.exited = False
        self.limited = False
        self.gave_up: object = None
        self.timed_out = False
        self._wait_number = 0
        self._poll: object = None
        self._polls = 0
        self.unordered: dict[int, int] = {}
        self.unordered_reads: dict[int, int] = {}
        self.unreleased: dict[int, int] = {}
        self.phases: dict[int, int] = {}
        self.blocks_run = [0] * cta.launch.program.block_count
        self.local = cta.launch.program.new_local_memory(self)
        self.cluster_generation: int | None = None
        self.trace: WarpTrace | None = cta.launch.new_trace(self)
        self.program: Program = cta.launch.program.start(self)

    @functools.cached_property
    def bulk_groups(self) -> BulkGroups:
        return BulkGroups(self, self.launch.events)

    @functools.cached_property
    def copy_groups(self) -> BulkGroups:
        return BulkGroups(self, self.launch.events)

    @functools.cached_property
    def tensor(self) -> TensorUnit:
        return TensorUnit(self)

    @functools.cached_property
    def part(self) -> WarpgroupPart:
        return WarpgroupPart(self, self.cta.warpgroup(self.index), self.launch.program.tuples)

    @property
    def name(self) -> str:
        return f"CTA {self.cta.position} warp {self.index}"

    def where(self, line: int) -> Where:
        return self.launch.program.where(line, self.cta.position, self.index)

    def line(self) -> int:
        """PTX line of the warp's current instruction."""
        frame = self.program.gi_frame
        return self.launch.program.line_of(frame.f_lineno) if frame is not None else 0

    def note(
        self,
        kind: str,
        line: int,
        key: Key = (),
        amount: int = 0,
        detail: object = None,
        where: Touched = (),
    ) -> None:
        """Record an event if the launch is traced; for the arguments see ``Event``."""
        if self.trace is not None:
            self.trace.append(Event(kind, line, key, amount, detail, where))

    # Other CTAs of the cluster

    def cta_at(self, address: int) -> "Cta":
        """The CTA addressed by a shared::cluster address; the access is recorded."""
        return self.reach(address >> RANK_SHIFT, address)

    def reach(self, rank: int, address: int = 0) -> "Cta":
        """CTA of a rank, about to be accessed; reports a CTA that may not have started."""
        if rank == self.cta.rank:
            return self.cta
        cta = self.cta.cluster.peer(rank, address)
        if not self.actor.learned(cta.start):
            self.launch.report(
                UnstartedPeer(
                    f"{self.name} reaches for CTA {cta.position} of its cluster, and nothing shows "
                    "that it has started: barrier.cluster.arrive and .wait are missing before"
                )
            )
        return cta

    def touch(self, cta: "Cta", clock: int, verb: str, line: int) -> None:
        """Note a generic access to another CTA."""
        if cta is not self.cta:
            cta.touch(self.actor.component, clock, verb, lambda: self.where(line))

    # Memory accesses of this warp

    def access(self, line: int, verb: str, strong: bool = False) -> Access:
        """A generic-proxy access of this warp at ``line``.

        Accesses of one line between two releases share one event and one object.
        """
        actor = self.actor
        found: Access | None = actor.interval.get((line, verb))
        if found is None:
            origin = Origin(f"generic {verb}", "generic", strong, lambda: self.where(line))
            events = self.launch.events
            event = events.new(actor.component, actor.now, origin)
            found = Access(events, event, actor.clocks, actor.known, self.launch.report)
            found.unordered, found.unordered_reads = self.unordered, self.unordered_reads
            actor.interval[line, verb] = found
        return found

    def one_lane(self, lane: int) -> OneLane:
        """Lane that issues asynchronous work now, with the unordered accesses of other lanes."""
        return OneLane(lane, frozenset(self.unordered), frozenset(self.unordered_reads))

    def order_lanes(self) -> None:
        """Order the accesses of all lanes among one another: bar.warp.sync or a barrier."""
        if self.unreleased or self.unordered or self.unordered_reads:
            self.unordered.clear()
            self.unordered_reads.clear()
            self.unreleased.clear()
            self.actor.advance()

    def wrote(self, event: int, mask: Mask) -> None:
        """Record a write to shared memory by lanes."""
        lanes = -1 if mask is None else self.mask_bits(mask)
        self.unordered[event] = self.unordered.get(event, 0) | lanes

    def read(self, event: int, mask: Mask) -> None:
        """Record a read of shared memory by lanes."""
        lanes = -1 if mask is None else self.mask_bits(mask)
        self.unordered_reads[event] = self.unordered_reads.get(event, 0) | lanes

    def accessed(self, event: int, mask: Mask) -> None:
        """Record an access by lanes, for the next release by the same lanes to cover."""
        lanes = -1 if mask is None else self.mask_bits(mask)
        self.unreleased[event] = self.unreleased.get(event, 0) | lanes

    def hand_over(self, mask: Mask, handed: Clocks) -> None:
        """Release the accesses of the lanes of ``mask``, but not the accesses of other lanes."""
        if self.unreleased:
            others = self.mask_bits(None) & ~self.mask_bits(mask)
            for unordered in (self.unordered, self.unordered_reads):
                for event, lanes in unordered.items():
                    unordered[event] = lanes & others
            for event in list(self.unordered_reads)[:-_REMEMBERED]:
                del self.unordered_reads[event]
            clock, component = self.launch.events.clock, self.actor.component
            self.unreleased = {e: lanes & others for e, lanes in self.unreleased.items()}
            for event in [e for e, lanes in self.unreleased.items() if not lanes]:
                del self.unreleased[event]
            for event in list(self.unreleased)[:-_REMEMBERED]:
                del self.unreleased[event]
            for event in self.unreleased:
                handed.withheld[event] = component, clock[event]

    def take_over(self, handed: Clocks) -> None:
        """Drop the unordered accesses that an acquired release covers: the lanes see them."""
        for unordered in (self.unordered, self.unordered_reads):
            if not unordered:
                continue
            clock, reached = self.launch.events.clock, handed.generic.get(self.actor.component, 0)
            for event in [e for e, lanes in unordered.items() if not lanes]:
                if clock[event] <= reached:
                    del unordered[event]

    def thread_index(self, axis: int) -> npt.NDArray[np.uint32]:
        """%tid along one axis."""
        linear = np.arange(self.index * LANES, (self.index + 1) * LANES, dtype=np.uint32)
        x, y, _ = self.launch.block
        return (linear % x, linear // x % y, linear // (x * y))[axis].astype(np.uint32)

    def issue(self, unit: str, queue: Hashable, run: Callable[[], None], line: int) -> None:
        """Queue work for an asynchronous unit; errors of the work name this warp and ``line``."""

        def guarded() -> None:
            try:
                run()
            except EmulatorError as error:
                raise error.at(self.where(line)) from None

        self.cta.cluster.units.issue(unit, queue, guarded)

    # Waiting

    def blocked(
        self,
        waiters: list[Callable[[], None]],
        what: Callable[[], str],
        limited: bool = False,
    ) -> None:
        """Put the warp to sleep until ``waiters`` are woken; the generated code yields right after.

        Args:
            waiters: list to join.
            what: description of the awaited event, for reports.
            limited: whether the wait has a time limit, which ends the wait when nothing else can
                run.
        """
        self.ready = False
        self.waits_for = what
        self.limited = limited
        self.timed_out = False
        self._wait_number += 1
        number = self._wait_number
        waiters.append(lambda: self.wake(number))

    def polled(self, line: int, places: Sequence[Place], value: bytes) -> None:
        """Note a strong load; after a few loads of one value, the warp sleeps until a write."""
        poll = line, places, value, self.actor.now
        self._polls = self._polls + 1 if poll == self._poll else 0
        self._poll = poll
        if self._polls >= _POLLS:
            self._polls = 0
            what = f"a write to {places[0][1]:#x}, which it has polled"
            waiters: list[Callable[[], None]] = []
            self.blocked(waiters, lambda: what, limited=True)
            for place in places:
                self.launch.pollers.setdefault(poll_key(place), []).extend(waiters)

    def wake(self, number: int) -> None:
        if not self.ready and number == self._wait_number:
            self._awake()
            self.launch.scheduler.resume(self)

    def time_out(self) -> None:
        """End a wait that has a time limit."""
        self.timed_out = True
        self._awake()
        self.cta.cluster.ready.append(self)

    def _awake(self) -> None:
        self.ready = True
        self.waits_for = None
        self.limited = False

    # Lanes

    def mask_bits(self, mask: Mask) -> int:
        lanes = self.live if mask is None else mask
        return int(np.packbits(lanes, bitorder="little").view(np.uint32)[0])

    def active(self, mask: Mask) -> list[int]:
        return (np.flatnonzero(self.live if mask is None else mask)).tolist()

    def require_all(self, mask: Mask, what: str) -> None:
        """Require, for ``.aligned`` instructions, that every lane that has not exited is active."""
        if mask is not None and not (mask | ~self.live).all():
            missing = np.flatnonzero(self.live & ~mask).tolist()
            self.launch.report(
                DivergentExecution(f"{what} without lanes {missing} of its warp: it is .aligned")
            )

    def run(self) -> bool:
        """Run until the warp waits or ends; returns False at the end.

        Raises:
            EmulatorError: a finding with its place.
        """
        try:
            self.program.send(None)
        except StopIteration:
            return False
        except EmulatorError as error:
            raise error.at(self.where(self._line_in(error))) from None
        except NameError as error:
            # The generated code holds registers in variables; a missing name is always a register.
            named = re.search(r"'(\w+)'", str(error))
            register = self.launch.program.register_of(named.group(1)) if named else None
            if register is None:
                raise
            raise UninitialisedRead(
                f"read of register {register} that nothing has written",
                self.where(self._line_in(error)),
            ) from None
        return True

    def _line_in(self, error: Exception) -> int:
        """PTX line of the generated code that raised an exception."""
        frames, line = error.__traceback__, 0
        while frames is not None:
            if frames.tb_frame.f_code is self.launch.program.code:
                line = self.launch.program.line_of(frames.tb_lineno)
            frames = frames.tb_next
        return line
