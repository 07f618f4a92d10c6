"""Accesses of earlier launches to global memory, for later launches that may overlap them.

A launch is ordered after everything before it in its stream, unless it is launched with
programmatic stream serialization. Then the launch may start once every CTA of its predecessor has
executed griddepcontrol.launch_dependents or has exited, neither of which makes the predecessor's
accesses visible; griddepcontrol.wait makes them all visible (PTX ISA, griddepcontrol; CUDA
Programming Guide, Programmatic Dependent Launch). Hence, for A, B, C launched in that order:

- B's wait covers A. The end of B implies the end of A if any thread of B has waited.
- C's wait covers B, and A only if B waited. Before its wait, C is not ordered after B's accesses,
and after A's accesses only if B waited and released no dependents before waiting.
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from tests.emulator.memory.clocks import (
    HOST,
    MBARRIER,
    NEVER,
    PREREQUISITE,
    UNREACHED,
    Earlier,
    Events,
    Origin,
)
from tests.emulator.memory.spaces import GlobalMemory

Numbers = npt.NDArray[np.int32]
RUN = 4096  # elements per changed run; with shorter runs, one write of the whole array is faster


@dataclass(eq=False)
class Grid:
    """State of one launch that decides how later launches are ordered after it.

    Attributes:
        kernel: entry name.
        running: by grid that may still run when this launch starts, the kernel whose missing
            griddepcontrol.wait leaves that grid unordered; "" if this launch's wait covers it.
        waited: whether a warp has executed griddepcontrol.wait.
        released_early: whether a warp has released dependents without a preceding wait.
    """

    kernel: str
    running: dict["Grid", str] = field(default_factory=dict)
    waited: bool = False
    released_early: bool = False

    def running_after(self) -> dict["Grid", str]:
        """``running`` of a dependent launch that follows this one."""
        found = {}
        for grid, unwaited in self.running.items():
            if self.waited and not unwaited:
                if self.released_early:
                    found[grid] = ""
            else:
                found[grid] = unwaited or self.kernel
        found[self] = ""
        return found


class History:
    """Record of all launches' accesses to global memory, by launch, PTX line and verb.

    Args:
        memory: global memory. Between launches its shadow holds numbers of the recorded accesses.
    """

    def __init__(self, memory: GlobalMemory) -> None:
        self._memory = memory
        self._running: dict[int, dict[Grid, str]] = {}  # by stream, for its next launch
        self._accesses: list[tuple[Grid, Origin]] = []  # from event MBARRIER + 1 on
        self._sets: list[frozenset[int]] = []

    def begin(self, kernel: str, stream: int, dependent: bool) -> tuple[Grid, Events]:
        """Begin the next launch; returns the state of its order, and its events.

        Args:
            kernel: entry name.
            stream: stream of the launch.
            dependent: whether the launch uses programmatic stream serialization.
        """
        running = self._running.pop(stream, {})
        if not dependent:
            # The launch is ordered after everything: all earlier accesses count as the host's.
            running = {}
            self._settle(Events(self._earlier({}), self._sets))
        return Grid(kernel, running), Events(self._earlier(running), self._sets)

    def end(self, stream: int, grid: Grid, events: Events) -> tuple[int, int]:
        """End a launch and drop its events.

        Returns:
            Bytes read and bytes written by the launch, each byte counted once.
        """
        running = grid.running_after()
        grid.running = {}
        self._running[stream] = running
        counted = self._settle(events, grid)
        kept = {grid, *(earlier for earlier, _ in self._accesses)}
        self._running[stream] = {g: unwaited for g, unwaited in running.items() if g in kept}
        return counted

    def synchronise(self, stream: int | None = None) -> None:
        """Mark all launches of a stream, or of all streams, as ended."""
        if stream is None:
            self._running.clear()
        else:
            self._running.pop(stream, None)

    def forget(self) -> None:
        """Attribute all accesses to the host."""
        self._running.clear()
        self._accesses, self._sets = [], []
        for memory in self._memory.used():
            np.minimum(memory.shadow.writer, HOST, out=memory.shadow.writer)
            memory.shadow.reader[...] = 0

    def _earlier(self, running: dict[Grid, str]) -> list[Earlier]:
        found = []
        for grid, origin in self._accesses:
            unwaited = running.get(grid)
            if unwaited is None:
                found.append(Earlier(0, origin))
            else:
                found.append(Earlier(UNREACHED if unwaited else PREREQUISITE, origin, unwaited))
        return found

    def _settle(self, events: Events, own: Grid | None = None) -> tuple[int, int]:
        """Renumber the shadow's events of ``own``, and of grids that a launch may still overlap."""
        if own is None and not self._running:
            if self._accesses:
                self.forget()
            return 0, 0
        running = {grid for met in self._running.values() for grid in met}
        numbering = _Numbering(self._accesses, events, own, running)
        read = written = 0
        for memory in self._memory.used():
            shadow = memory.shadow
            values, lengths = _renumber(shadow.writer, numbering.writer)
            count = int(lengths[values >= events.first].sum()) * memory.granule
            written += min(count, memory.nbytes)
            values, lengths = _renumber(shadow.reader, numbering.readers)
            mine = (values >= events.first) | (values < events.last_set)
            count = int(lengths[mine].sum()) * memory.granule
            read += min(count, memory.nbytes)
        self._accesses, self._sets = numbering.accesses, list(numbering.sets)
        return read, written


class _Numbering:
    """Numbers that replace the last launch's event numbers: one per grid, PTX line and verb.

    Args:
        earlier: accesses before the last launch.
        events: events of the last launch.
        own: the last launch; None if it has no events of its own.
        running: grids that a launch may still overlap; accesses of other grids count as the host's.

    Attributes:
        accesses: accesses by new number, from MBARRIER + 1 on.
        sets: sets of readers, by new number from -1 down.
    """

    def __init__(
        self,
        earlier: Sequence[tuple[Grid, Origin]],
        events: Events,
        own: Grid | None,
        running: Set[Grid],
    ) -> None:
        self._earlier = earlier
        self._events = events
        self._own = own
        self._running = running
        self._known: dict[int, int] = {}
        self._own_lines: dict[tuple[str, bool, int], int] = {}
        self.accesses: list[tuple[Grid, Origin]] = []
        self.sets: dict[frozenset[int], int] = {}

    def writer(self, event: int) -> int:
        if event <= MBARRIER:
            return event
        found = self._known.get(event)
        if found is None:
            found = self._known[event] = self._new(event)
        return found

    def readers(self, number: int) -> int:
        if number == NEVER:
            return number
        found = frozenset(map(self.writer, self._events.readers(number))) - {HOST}
        if len(found) < 2:
            return next(iter(found), NEVER)
        return self.sets.setdefault(found, -len(self.sets) - 1)

    def _new(self, event: int) -> int:
        if event < self._events.first:
            grid, origin = self._earlier[event - MBARRIER - 1]
            return self._append(grid, origin) if grid in self._running else HOST
        assert self._own is not None
        origin = self._events.origin[event]
        # No CTA or warp: the event represents all accesses of the line.
        place = replace(origin.where(), cta=None, warp=None)
        key = origin.verb, origin.strong, place.line
        if key not in self._own_lines:
            kept = Origin(origin.verb, origin.proxy, origin.strong, lambda: place)
            self._own_lines[key] = self._append(self._own, kept)
        return self._own_lines[key]

    def _append(self, grid: Grid, origin: Origin) -> int:
        self.accesses.append((grid, origin))
        return MBARRIER + len(self.accesses)


def _renumber(numbers: Numbers, new: Callable[[int], int]) -> tuple[Numbers, Numbers]:
    """Replace every number in place; returns the old number and the length of each run."""
    first = numbers.item(0)
    if numbers.item(-1) == first and (numbers == first).all():  # true of most memories
        if (only := new(first)) != first:
            numbers[...] = only
        return np.array([first], np.int32), np.array([numbers.size], np.int32)
    starts = np.flatnonzero(np.concatenate(([True], numbers[1:] != numbers[:-1])))
    lengths = np.diff(starts, append=numbers.size)
    values = numbers[starts]
    distinct, inverse = np.unique(values, return_inverse=True)
    replaced = np.array([new(number) for number in distinct.tolist()], np.int32)
    (changed,) = np.nonzero((replaced != distinct)[inverse])
    if len(changed) > numbers.size // RUN:
        numbers[...] = np.repeat(replaced[inverse], lengths)
    else:  # large memory, little of it touched by the launch
        for run in changed.tolist():
            numbers[starts[run] : starts[run] + lengths[run]] = replaced[inverse[run]]
    return values, lengths
