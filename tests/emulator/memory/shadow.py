"""Shadow of memory: last writer and readers of each granule, checked against each access."""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tests.emulator.findings import (
    ArrayOverrun,
    BarrierMisuse,
    DataRace,
    EmulatorError,
    MissingDependencyWait,
    MissingProxyFence,
    MissingTensorFence,
    NarrowScope,
    UninitialisedRead,
)
from tests.emulator.memory.clocks import (
    GUARD,
    MBARRIER,
    NEVER,
    Clock,
    Clocks,
    Events,
    Origin,
    Report,
)

Events32 = npt.NDArray[np.int32]
Lanes = npt.NDArray[np.int8] | int
ANY_LANE = -1
MANY_LANES = -2
_FEW = 64  # granules
Selection = Any  # any numpy index: a slice, a tuple of slices, an index array


class Access:
    """Access to memory as one event, with the events known to precede it.

    Args:
        events: events of the launch.
        event: event of this access.
        before: clocks of the actor at the issue of the access.
        known: events found ordered so far; kept by the actor, since order never goes away.
        pipe: component whose earlier events are in order with this access (a tensor pipe), or 0.
        report: called with a finding; raises the finding unless it is tolerated.
    """

    __slots__ = (
        "before", "event", "events", "known", "lanes", "pipe", "report", "unordered",
        "unordered_reads",
    )  # fmt: skip

    def __init__(
        self,
        events: Events,
        event: int,
        before: Clocks,
        known: set[int],
        report: Report,
        pipe: int = 0,
    ) -> None:
        self.events = events
        self.event = event
        self.before = before
        self.known = known
        self.report = report
        self.pipe = pipe
        # Writes and reads of the same warp that no bar.warp.sync has ordered, and the accessing
        # lanes: one for all granules, one for each, MANY_LANES, or ANY_LANE where the lane does not
        # matter.
        self.unordered: Collection[int] = frozenset()
        self.unordered_reads: Collection[int] = frozenset()
        self.lanes: Lanes = ANY_LANE

    def after_write(self, earlier: int, memory: str, verb: str) -> None:
        """Check that the write event ``earlier`` happens before this access."""
        if earlier in self.known or earlier == self.event:
            return
        if earlier == MBARRIER:
            self.report(BarrierMisuse(f"{verb} of {memory} that holds a live mbarrier"))
            return
        events = self.events
        mine, theirs = events.origin[self.event], events.origin[earlier]
        if self._ordered(earlier, theirs.proxy == "generic"):
            self.known.add(earlier)
        elif not (mine.strong and theirs.strong):
            self.report(self._race(earlier, memory, verb))
            self.known.add(earlier)

    def after_reads(self, number: int, memory: str, verb: str) -> None:
        """Check that the reads of reader ``number`` happen before this write."""
        if number in self.known or number == self.event:
            return
        mine = self.events.origin[self.event]
        for earlier in self.events.readers(number):
            if earlier in self.known or earlier == self.event:
                continue
            if self._ordered(earlier, False):
                self.known.add(earlier)
            elif not (mine.strong and self.events.origin[earlier].strong):
                self.report(self._race(earlier, memory, verb))
                self.known.add(earlier)

    def _view(self, generic_write: bool) -> Clock:
        proxy = self.events.origin[self.event].proxy
        if proxy == "tensor":
            return self.before.tensor
        if proxy == "async" and generic_write:
            return self.before.proxy
        return self.before.generic

    def _ordered(self, earlier: int, generic_write: bool) -> bool:
        component = self.events.component[earlier]
        if component == self.pipe:
            return True
        before = self.before
        if before.withheld and earlier in before.withheld:
            return False
        if before.narrow and self._too_narrow(earlier):
            return False
        return self._view(generic_write).get(component, 0) >= self.events.clock[earlier]

    def _too_narrow(self, earlier: int) -> bool:
        """Whether only a release or acquire of too narrow a scope orders the two accesses.

        Unless scopes are strict, only generic accesses count: where a barrier orders accesses of an
        asynchronous unit, NVIDIA's own kernels wait with .cta.
        """
        events, component = self.events, self.events.component[earlier]
        if not events.strict_scopes and (
            {events.origin[e].proxy for e in (self.event, earlier)} != {"generic"}
        ):
            return False
        return self.before.narrow.get(component, events.clock[earlier]) < events.clock[earlier]

    def _race(self, earlier: int, memory: str, verb: str) -> EmulatorError:
        component, clock = self.events.component[earlier], self.events.clock[earlier]
        theirs = self.events.origin[earlier]
        mine = self.events.origin[self.event]
        if earlier < self.events.first:
            before = self.events.earlier[earlier]
            return self._overlap(before.origin, memory, verb, before.unwaited)
        numbers = self.events.launch_of(earlier), self.events.launch_of(self.event)
        if numbers[0] < numbers[1]:
            return self._overlap(theirs, memory, verb)
        if numbers[0] > numbers[1]:
            return self._overtaken(theirs, memory, verb)
        place = f"{verb} of {memory} after a {theirs.verb} at {theirs.where()}"
        kind: type[EmulatorError] = DataRace
        why = "nothing orders the two"
        if earlier in self.before.withheld:
            why = "a lane that was elected released it for the others; bar.warp.sync is missing"
        elif self.before.narrow and self._too_narrow(earlier):
            kind = NarrowScope
            why = (
                "the scope of the release or of the acquire between the two, .cta if it names "
                "none, leaves out the other's CTA"
            )
        elif self.before.generic.get(component, 0) >= clock:
            if mine.proxy == "tensor":
                kind, why = MissingTensorFence, "tcgen05.fence::after_thread_sync is missing"
            elif mine.proxy == "async":
                kind, why = MissingProxyFence, "fence.proxy.async between the two is missing"
        elif self.before.tensor.get(component, 0) >= clock or theirs.proxy == "tensor":
            why = "nothing orders the two (a wait::ld, wait::st or commit, then a barrier)"
        return kind(f"{place}: {why}", mine.where())

    def _overlap(
        self, earlier: Origin, memory: str, verb: str, unwaited: str = ""
    ) -> EmulatorError:
        mine, theirs = self.events.origin[self.event].where(), earlier.where()
        place = (
            f"{verb} of {memory} by {mine.kernel} after a {earlier.verb} by {theirs.kernel} "
            f"at {theirs}"
        )
        if unwaited:
            why = (
                f"{unwaited}, launched between the two, executes no griddepcontrol.wait: "
                "that it has ended does not say that the other has"
            )
        else:
            why = (
                "programmatic stream serialization lets this launch start before that one has "
                f"ended; griddepcontrol.wait before the {verb} is missing"
            )
        return MissingDependencyWait(f"{place}: {why}", mine)

    def _overtaken(self, later: Origin, memory: str, verb: str) -> EmulatorError:
        mine, theirs = self.events.origin[self.event].where(), later.where()
        return MissingDependencyWait(
            f"{verb} of {memory} by {mine.kernel} after a {later.verb} by {theirs.kernel} at "
            f"{theirs}: programmatic stream serialization lets that launch start before this one "
            f"has ended; griddepcontrol.wait before the {later.verb} is missing",
            mine,
        )

    def joined(self, number: int) -> int:
        """Number of the reader set that adds this access to the readers of ``number``."""
        if number in self.known or number == self.event:
            return self.event
        earlier = self.events.readers(number)
        if self.event in earlier:
            return number
        kept = frozenset(e for e in earlier if e not in self.known and not self._ordered(e, False))
        return self.events.reader_number(kept | {self.event})


class OneLane(NamedTuple):
    """One lane that issues an asynchronous access, and the unordered accesses of the other lanes.

    Attributes:
        lane: lane of the warp.
        unordered, unordered_reads: events, as in ``Warp``, at the time of the issue.
    """

    lane: int
    unordered: frozenset[int]
    unordered_reads: frozenset[int]

    def given(self, access: Access) -> Access:
        """Attribute ``access`` to this lane; returns ``access``."""
        access.lanes, access.unordered = self.lane, self.unordered
        access.unordered_reads = self.unordered_reads
        return access


def _distinct(events: Events32) -> Sequence[int]:
    """Distinct events of some granules, in order."""
    if events.size <= _FEW:  # typical for lanes: numpy's own calls have more overhead than work
        found = set(events.ravel().tolist())
        return tuple(found) if len(found) == 1 else sorted(found)
    flat = events.ravel()
    changes = flat[1:] != flat[:-1]  # few: neighbouring granules mostly share an event
    first: int = flat.item(0)
    if not changes.any():
        return (first,)
    return sorted({first, *flat[1:][changes].tolist()})


class Shadow:
    """Last writer and readers of each granule.

    Args:
        shape: shape of the granules.
        name: name of the memory in reports.
        initialised: whether the host has written the memory.
        base, step: address of the first granule and bytes per granule, for reports; step 0 for
            cells.

    Attributes:
        between: function that names the arrays around an offset, where the memory has guards.
    """

    def __init__(
        self,
        shape: int | tuple[int, ...],
        name: str,
        initialised: bool = False,
        base: int = 0,
        step: int = 0,
    ) -> None:
        self.name = name
        self.base = base
        self.step = step
        self.initialised = initialised
        self.writer: npt.NDArray[np.int32] = np.zeros(shape, np.int32)
        self.reader: npt.NDArray[np.int32] = np.zeros(shape, np.int32)
        self.between: Callable[[int], str] = hex

    def guard(self, granules: npt.NDArray[np.intp], between: Callable[[int], str]) -> None:
        """Make every access to ``granules`` a finding."""
        self.writer[granules] = GUARD
        self.between = between

    def read(self, where: Selection, access: Access) -> None:
        """Check and record a read of the selected granules."""
        readers = self.reader[where]
        joined = self._read(self.writer[where], readers, access, where)
        if joined is not None:
            self.reader[where] = joined

    def read_view(self, writers: Events32, readers: Events32, access: Access) -> None:
        """:meth:`read` of granules given as views of ``writer`` and ``reader``."""
        joined = self._read(writers, readers, access)
        if joined is not None:
            readers[...] = joined

    def _read(
        self, writers: Events32, readers: Events32, access: Access, where: Selection = None
    ) -> "Events32 | int | None":
        """Check a read; returns the reader numbers to record, None if they do not change."""
        for event in _distinct(writers):
            if event in access.unordered and access.lanes is not ANY_LANE:
                self._check_lanes(event, writers, self.lane[where], access, "read")
            if event == GUARD:
                self._overrun(where, writers, access, "read")
            elif event != NEVER:
                access.after_write(event, self.name, "read")
            elif not self.initialised:
                place = self._place(where, writers, NEVER)
                fact = f"read of {self.name}{place} that nothing has written"
                access.report(UninitialisedRead(fact))
        if access.event in access.unordered_reads and access.lanes is not ANY_LANE:
            self._read_by_lanes(where, access)
        found = _distinct(readers)
        if len(found) == 1:
            return None if found[0] == access.event else access.joined(found[0])
        numbers, inverse = np.unique(readers, return_inverse=True)
        joined = np.array([access.joined(n) for n in numbers.tolist()], np.int32)
        return joined[inverse].reshape(readers.shape)

    @functools.cached_property
    def lane(self) -> npt.NDArray[np.int8]:
        """Lane that wrote each granule; for shared memory only."""
        return np.full(self.writer.shape, ANY_LANE, np.int8)

    @functools.cached_property
    def reading(self) -> tuple[Events32, npt.NDArray[np.int8]]:
        """Last read of each granule by lanes, and the lane; for shared memory only."""
        shape = self.writer.shape
        return np.zeros(shape, np.int32), np.full(shape, ANY_LANE, np.int8)

    def _read_by_lanes(self, where: Selection, access: Access) -> None:
        """Record the reading lanes; as "several lanes" if another lane's read is unordered too."""
        events, lanes = self.reading
        before, mine = events[where], access.lanes
        others = np.zeros(before.shape, bool)
        for event in _distinct(before):
            if event in access.unordered_reads:
                others |= (before == event) & (lanes[where] != mine)
        lanes[where] = np.where(others, np.int8(MANY_LANES), mine)
        events[where] = access.event
        if isinstance(mine, np.ndarray) and (mixed := lanes[where] != mine).any():
            lanes[where[mixed]] = MANY_LANES  # otherwise the last lane would stand for all

    def _check_lanes(
        self,
        event: int,
        events: Events32,
        lanes: npt.NDArray[np.int8],
        access: Access,
        verb: str,
    ) -> None:
        """Report a lane that touches data of another lane of its warp without ordering."""
        foreign = (events == event) & (lanes != ANY_LANE)
        foreign &= (lanes != access.lanes) | (lanes == MANY_LANES)
        if foreign.any():
            lane = int(lanes[int(np.flatnonzero(foreign)[0])])
            theirs = access.events.origin[event]
            who = "several lanes" if lane == MANY_LANES else f"lane {lane}"
            access.report(
                DataRace(
                    f"{verb} of {self.name} after a {theirs.verb} of {who} of the same warp at "
                    f"{theirs.where()}: bar.warp.sync between the two is missing",
                    access.events.origin[access.event].where(),
                )
            )

    def _check_write_by_lanes(self, writers: Events32, access: Access, where: Selection) -> None:
        """Report a lane that overwrites another lane's unordered writes or reads."""
        if access.unordered:
            for event in _distinct(writers):
                if event in access.unordered:
                    self._check_lanes(event, writers, self.lane[where], access, "write")
        if access.unordered_reads:
            events, lanes = self.reading
            before = events[where]
            for event in _distinct(before):
                if event in access.unordered_reads:
                    self._check_lanes(event, before, lanes[where], access, "write")

    def _overrun(self, where: Selection, writers: Events32, access: Access, verb: str) -> None:
        """Report an access to guards."""
        number = int(np.flatnonzero(writers.reshape(-1) == GUARD)[0])
        granule = where.start + number if isinstance(where, slice) else where.reshape(-1)[number]
        place = self._place(where, writers, GUARD)
        access.report(
            ArrayOverrun(
                f"{verb} of {self.name}{place}: {self.between(int(granule) * self.step)}",
                access.events.origin[access.event].where(),
            )
        )

    def _place(self, where: Selection, writers: Events32, event: int) -> str:
        """Place of the first granule that ``event`` wrote, for a report."""
        number = int(np.flatnonzero(writers.reshape(-1) == event)[0])
        if isinstance(where, slice):
            return f" at {self.base + (where.start + number) * self.step:#x}"
        if isinstance(where, np.ndarray):
            return f" at {self.base + int(where.reshape(-1)[number]) * self.step:#x}"
        if isinstance(where, tuple) and all(isinstance(axis, slice) for axis in where):
            lane, column = divmod(number, writers.shape[1])
            return f" at lane {where[0].start + lane}, column {where[1].start + column},"
        return ""

    def write(self, where: Selection, access: Access) -> None:
        """Check and record a write of the selected granules."""
        self.order(where, access)
        self.writer[where] = access.event
        self.reader[where] = 0

    def write_view(self, writers: Events32, readers: Events32, access: Access) -> None:
        """:meth:`write` of granules given as views of ``writer`` and ``reader``."""
        self._order(writers, readers, access)
        writers[...] = access.event
        readers[...] = 0

    def order(self, where: Selection, access: Access) -> None:
        """Check that all earlier accesses to the selected granules happen before ``access``."""
        self._order(self.writer[where], self.reader[where], access, where)

    def _order(
        self, writers: Events32, readers: Events32, access: Access, where: Selection = None
    ) -> None:
        if access.lanes is not ANY_LANE:
            self._check_write_by_lanes(writers, access, where)
        for event in _distinct(writers):
            if event == GUARD:
                self._overrun(where, writers, access, "write")
            else:
                access.after_write(event, self.name, "write")
        for number in _distinct(readers):
            access.after_reads(number, self.name, "write")

    def mark(self, where: Selection, event: int) -> None:
        """Set the writer without a check: allocation, mbarrier objects, the host."""
        self.writer[where] = event
        self.reader[where] = 0
