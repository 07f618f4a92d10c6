"""Happens-before: vector clocks over warps and asynchronous units, in several views.

A *component* is a unit that orders its own work: a warp, an mbarrier's phases (and the bulk copies
that complete on the mbarrier), the tensor pipe of an issuing warp, a warp's bulk groups, its
tcgen05.ld and .st. An access is an *event*: a component, the component's clock, and the place of
the access. Event e happens before an actor's next access when the actor's clock of e's component
has reached e's clock.

Barriers alone do not order everything. Each actor therefore holds several views of the same clocks:

``generic``  events that precede the actor's loads and stores;
``proxy``    generic writes visible to the async proxy from here on (PTX ISA, Async proxy);
             fence.proxy.async raises this view to ``generic``;
``tensor``   events that precede the actor's tcgen05 instructions (PTX ISA, tcgen05 memory
             consistency); tcgen05.fence::after_thread_sync raises this view to ``generic``,
             and ::before_thread_sync publishes it.
``inits``    initialised mbarriers and started CTAs: fence.mbarrier_init publishes an
             initialisation, a CTA's start publishes the start, even through a relaxed arrival on
             the cluster barrier.
``fenced``   events that tcgen05.commit and tcgen05.fence::before_thread_sync publish even through
             relaxed arrivals; after a relaxed wait, tcgen05.fence::after_thread_sync acquires them.

Two exceptions to ``generic`` travel along, both mostly empty:

``narrow``   components learned through a release or an acquire whose scope excludes the other
             side's CTA (PTX ISA, Scope), with the clock learned through sufficient scopes: for
             generic accesses of both sides, a narrow scope gives no order.
``withheld`` accesses of lanes that took no part in a release of their warp and that no
             bar.warp.sync had ordered before the release.
"""

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from tests.emulator.findings import EmulatorError, Where

Clock = dict[int, int]

NEVER = 0  # event of uninitialised memory
HOST = 1  # event of everything that precedes the launch
MBARRIER = 2  # event of the eight bytes of a live mbarrier object
GUARD = -1  # event of bytes between the arrays of shared memory

PREREQUISITE = 1  # component of earlier launches that griddepcontrol.wait waits for
UNREACHED = 2  # component of earlier launches that griddepcontrol.wait does not cover


class Scope(IntEnum):
    """Threads that a release or an acquire includes (PTX ISA, Scope)."""

    CTA = 0
    CLUSTER = 1
    GPU = 2
    SYS = 3


def join(into: Clock, other: Clock) -> None:
    """Raise ``into``, component by component, to the later of both clocks."""
    for component, clock in other.items():
        if component not in into or into[component] < clock:  # no call: a hot loop
            into[component] = clock


@dataclass(slots=True)
class Clocks:
    """Clocks of all views, held by an actor or published by a release."""

    generic: Clock = field(default_factory=dict)
    proxy: Clock = field(default_factory=dict)
    tensor: Clock = field(default_factory=dict)
    inits: Clock = field(default_factory=dict)
    fenced: Clock = field(default_factory=dict)
    narrow: Clock = field(default_factory=dict)
    withheld: dict[int, tuple[int, int]] = field(default_factory=dict)  # event: component, clock

    def copy(self) -> "Clocks":
        return Clocks(
            self.generic.copy(),
            self.proxy.copy(),
            self.tensor.copy(),
            self.inits.copy(),
            self.fenced.copy(),
            self.narrow.copy(),
            self.withheld.copy(),
        )

    def narrowed(self) -> "Clocks":
        """Copy of the clocks, as learned through too narrow a scope."""
        found = self.copy()
        found.narrow = dict.fromkeys(self.generic, 0)
        return found

    def well_known(self, component: int) -> int:
        """Clock of a component, as far as it was learned through scopes that include this CTA."""
        return self.narrow.get(component, self.generic.get(component, 0))

    def join(self, other: "Clocks") -> None:
        """Merge the clocks of an acquire. An acquire alone does not order tcgen05 accesses."""
        if self.narrow or other.narrow:
            self._join_narrow(other)
        if self.withheld or other.withheld:
            self._join_withheld(other)
        join(self.generic, other.generic)
        join(self.proxy, other.proxy)
        if other.inits:
            join(self.inits, other.inits)
        if other.fenced:
            join(self.fenced, other.fenced)

    def _join_narrow(self, other: "Clocks") -> None:
        """Keep as narrow the clocks that neither side knows through a sufficient scope."""
        for component in {**self.narrow, **other.narrow}:
            mine, theirs = (
                (side.generic.get(component, 0), side.narrow.get(component))
                for side in (self, other)
            )
            well = max(known if narrow is None else narrow for known, narrow in (mine, theirs))
            if well < max(mine[0], theirs[0]):
                self.narrow[component] = well
            else:
                self.narrow.pop(component, None)

    def _join_withheld(self, other: "Clocks") -> None:
        """Keep as withheld the accesses that neither side knows as released."""
        self.withheld = {
            event: place
            for event, place in {**self.withheld, **other.withheld}.items()
            if not self._handed(event, place) and not other._handed(event, place)
        }

    def _handed(self, event: int, place: tuple[int, int]) -> bool:
        component, clock = place
        return event not in self.withheld and self.generic.get(component, 0) >= clock


class Snapshot(Clocks):
    """Clocks of an actor at the issue of asynchronous work, and events known to precede the work.

    Scopes do not matter to asynchronous work unless ``strict_scopes``.
    """

    __slots__ = ("known",)

    def __init__(self, clocks: Clocks, strict_scopes: bool = False) -> None:
        super().__init__(
            clocks.generic.copy(),
            clocks.proxy.copy(),
            clocks.tensor.copy(),
            narrow=clocks.narrow.copy() if strict_scopes else {},
            withheld=clocks.withheld.copy(),
        )
        self.known: dict[str, set[int]] = {"async": {NEVER, HOST}, "tensor": {NEVER, HOST}}


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of an access, for reports and for the rules that depend on it.

    Attributes:
        verb: "generic write", "TMA read" ...
        proxy: "generic", "async" or "tensor".
        strong: whether the access is atomic, volatile, relaxed, acquire or release: two strong
            accesses never race.
        where: place, resolved when reported.
    """

    verb: str
    proxy: str
    strong: bool
    where: Callable[[], Where]


@dataclass(frozen=True, slots=True)
class Earlier:
    """Accesses of an earlier launch, represented by one event of this launch.

    Attributes:
        component: PREREQUISITE, UNREACHED, or 0 if this launch is ordered after the accesses.
        origin: origin of the accesses: the PTX line, without CTA or warp.
        unwaited: kernel launched in between whose griddepcontrol.wait is missing, if UNREACHED.
    """

    component: int
    origin: Origin
    unwaited: str = ""


class Events:
    """All events of one launch, by number; and the sets of concurrent readers.

    Args:
        earlier: events of earlier launches, numbered first.
        sets: sets of readers among the earlier events.

    Attributes:
        earlier: earlier events by number.
        first: first event of this launch.
        last_set: last set of readers that is not from this launch.
        done: component that stands for all accesses of the launch once it has ended, where launches
            overlap and share their events.
        strict_scopes: see ``Gpu``.
    """

    def __init__(
        self, earlier: Sequence[Earlier] = (), sets: Sequence[frozenset[int]] = ()
    ) -> None:
        nobody = Earlier(0, Origin("the launch", "generic", True, lambda: Where("", 0, "")))
        self.earlier = [nobody, nobody, nobody, *earlier]
        self.component = [e.component for e in self.earlier]
        self.clock = [int(component > 0) for component in self.component]
        self.origin = [e.origin for e in self.earlier]
        self._new_components = itertools.count(UNREACHED + 1)
        self._sets = [frozenset[int](), *sets]
        self._set_number = {known: number for number, known in enumerate(sets, 1)}
        self.first = len(self.earlier)
        self.last_set = -len(sets)
        self.done = 0
        self.strict_scopes = False
        self._launch_of: dict[int, int] | None = None
        self._number = 0

    def split(self, count: int) -> "list[Events]":
        """Copies of the events, one for each of ``count`` overlapping launches."""
        self._launch_of = {}
        found = []
        for number in range(count):
            part = copy.copy(self)
            part._number = number
            part.done = part.new_component()
            found.append(part)
        return found

    def finish(self) -> None:
        """Mark the launch as ended: one component stands for all of its accesses."""
        if self._launch_of is None:
            return
        component, clock = self.component, self.clock
        for event in range(self.first, len(component)):
            if self._launch_of[component[event]] == self._number:
                component[event], clock[event] = self.done, 1

    def launch_of(self, event: int) -> int:
        """Number of an event's launch."""
        return self._launch_of[self.component[event]] if self._launch_of else 0

    def new_component(self) -> int:
        component = next(self._new_components)
        if self._launch_of is not None:
            self._launch_of[component] = self._number
        return component

    def new(self, component: int, clock: int, origin: Origin) -> int:
        self.component.append(component)
        self.clock.append(clock)
        self.origin.append(origin)
        return len(self.clock) - 1

    def readers(self, number: int) -> frozenset[int]:
        """The events of a reader number: one event, or a set (negative number)."""
        return self._sets[-number] if number < 0 else frozenset((number,))

    def reader_number(self, events: frozenset[int]) -> int:
        if len(events) == 1:
            return next(iter(events))
        number = self._set_number.get(events)
        if number is None:
            number = self._set_number[events] = len(self._sets)
            self._sets.append(events)
        return -number


Report = Callable[[EmulatorError], None]


class Actor:
    """One warp as an actor of the happens-before order.

    Args:
        events: events of the launch.
        strict: whether tcgen05 accesses need the tcgen05.fence instructions around a barrier. If
            not, every acquire and release includes the fences.

    Attributes:
        clocks: the views of the actor's clocks.
        component: component of the actor.
        now: clock of the actor's component, advanced by each release.
        known: events known to precede the actor's generic accesses.
        interval: accesses since the last release or fence, by PTX line and verb.
    """

    def __init__(self, events: Events, strict: bool) -> None:
        self.events = events
        self.strict = strict
        self.component = events.new_component()
        self.clocks = Clocks()
        self.now = 1
        self.clocks.generic[self.component] = 1
        self.known: set[int] = {NEVER, HOST}
        self.interval: dict[tuple[int, str], Any] = {}
        self._snapshot: Snapshot | None = None
        self._fence_released: tuple[Clocks, Scope] | None = None
        self._fence_wanted = Clocks()
        self._fence_reach = Scope.CTA  # scope that a fence needs to acquire the wanted clocks

    def snapshot(self) -> Snapshot:
        """Read-only copy of the current clocks; the same object until the clocks change."""
        if self._snapshot is None:
            self._snapshot = Snapshot(self.clocks, self.events.strict_scopes)
        return self._snapshot

    def release(self) -> Clocks:
        """Clocks of a release at this point; later accesses are not part of the release."""
        handed = self.clocks.copy()
        self.advance()
        return handed

    def advance(self) -> None:
        """Start a new interval: later accesses come after the preceding fence or release."""
        self.now += 1
        self.clocks.generic[self.component] = self.now
        self.interval = {}
        self._snapshot = None

    def acquire(self, handed: Clocks) -> None:
        self.clocks.join(handed)
        if not self.strict:
            join(self.clocks.tensor, handed.generic)
        self._snapshot = None

    def finished(
        self, component: int, clock: int, tensor: bool = False, proxy: bool = True
    ) -> None:
        """Order the actor after completed work of a unit: a group of copies, tcgen05.ld or .st.

        Args:
            component: component of the unit.
            clock: clock that the unit has reached.
            tensor: whether the work is a tcgen05.ld or .st.
            proxy: whether the async proxy sees the work: true of the proxy's own work.
        """
        clocks = self.clocks
        views = [clocks.tensor] if tensor else [clocks.generic, clocks.tensor]
        if proxy and not tensor:
            views.append(clocks.proxy)
        if tensor and not self.strict:
            views.append(clocks.generic)
        for view in views:
            view[component] = max(view.get(component, 0), clock)
        self._snapshot = None

    def fence_proxy(self) -> None:
        """fence.proxy.async: make generic writes so far visible to the async proxy."""
        join(self.clocks.proxy, self.clocks.generic)
        self.advance()

    def fence_inits(self) -> None:
        """fence.mbarrier_init: let even a relaxed cluster arrival publish the mbarriers so far."""
        self.clocks.inits[self.component] = self.now
        self.advance()

    def relaxed(self) -> Clocks:
        """Clocks that a relaxed arrival publishes: those of the last fence and initialisation."""
        handed = self._fence_released[0].copy() if self._fence_released else Clocks()
        join(handed.inits, self.clocks.inits)
        join(handed.fenced, self.clocks.fenced)
        # Under the negated component: the instructions that the warp has executed, loads included.
        handed.inits[-self.component] = self.now
        return handed

    def observe(self, handed: Clocks) -> None:
        """Note the clocks behind a relaxed wait: a later fence acquires these clocks."""
        self._fence_wanted.join(handed)

    def seen(self, component: int) -> int:
        """Highest clock of a component that the actor has learned of; 0 if none.

        Relaxed arrivals count even before a fence acquires their clocks.
        """
        wanted = self._fence_wanted.generic
        return max(self.clocks.generic.get(component, 0), wanted.get(component, 0))

    def knows(self, component: int, clock: int) -> bool:
        """Whether the actor is ordered after a component's clock.

        With ``strict_scopes``, only through scopes that include the actor's CTA.
        """
        clocks = self.clocks
        if self.events.strict_scopes:
            return clocks.well_known(component) >= clock
        return clocks.generic.get(component, 0) >= clock

    def learned(self, component: int) -> bool:
        """Whether the actor has learned of a component in ``inits``; relaxed arrivals count too."""
        return component in self.clocks.inits or component in self._fence_wanted.inits

    def fence_tensor_before(self) -> None:
        """tcgen05.fence::before_thread_sync: let later releases publish finished tcgen05 work."""
        join(self.clocks.generic, self.clocks.tensor)
        join(self.clocks.fenced, self.clocks.tensor)
        self._snapshot = None

    def fence_tensor_after(self) -> None:
        """tcgen05.fence::after_thread_sync: order later tcgen05 work after the acquired events."""
        join(self.clocks.tensor, self.clocks.generic)
        join(self.clocks.tensor, self._fence_wanted.fenced)
        self._snapshot = None

    def fence_thread(self, scope: Scope) -> None:
        """fence.acq_rel, fence.sc, membar: later strong writes release, earlier reads acquire."""
        wanted = self._fence_wanted
        self.acquire(wanted if scope >= self._fence_reach else wanted.narrowed())
        self._fence_wanted, self._fence_reach = Clocks(), Scope.CTA
        self._fence_released = self.release(), scope

    def strong_write(self, releasing: bool, scope: Scope) -> tuple[Clocks, Scope] | None:
        """Clocks and scope that a strong write publishes at its address; None without a release."""
        if releasing:
            return self.release(), scope
        if self._fence_released is None:
            return None
        clocks, fenced = self._fence_released
        return clocks.copy(), min(scope, fenced)

    def strong_read(self, published: Clocks, acquiring: bool, reach: Scope) -> None:
        """Acquire published clocks; a relaxed read acquires at a fence that reaches the writer."""
        if acquiring:
            self.acquire(published)
        else:
            self._fence_wanted.join(published)
            self._fence_reach = max(self._fence_reach, reach)
