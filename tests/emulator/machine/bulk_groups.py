"""Bulk and cp.async groups: commit_group closes a group, wait_group waits for groups."""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.emulator.findings import Where
from tests.emulator.memory.clocks import Events

if TYPE_CHECKING:
    from tests.emulator.machine.warp import Warp


class BulkGroups:
    """A warp's groups of one kind of asynchronous copy, in order.

    Operations of a group are tagged with two components: ``reads`` (the sources have been read) and
    ``writes`` (the results are visible). Waiting for a group advances the warp's clocks to the
    group's clock. Groups are private to a thread (PTX ISA, async-group): a commit or wait counts
    for an operation only if the issuing lanes take part.

    Attributes:
        reads, writes: components.
        clock: clock of newly issued operations, from 1.
        pending: clocks of operations that have not run yet, in order.
    """

    def __init__(self, warp: "Warp", events: Events) -> None:
        self._warp = warp
        self.reads = events.new_component()
        self.writes = events.new_component()
        self.clock = 1
        self.pending: deque[int] = deque()
        self._closed: list[int] = []  # last clock of each group
        # Operations without a wait: clock -> issuing lanes, and first line.
        self._outstanding: dict[int, tuple[int, int]] = {}
        self.queue = ("group", self.reads)

    def issued(self, line: int, lanes: int) -> int:
        """Add an operation of ``lanes`` (a bit each) to the open group; returns its clock."""
        known, first = self._outstanding.get(self.clock, (0, line))
        self._outstanding[self.clock] = known | lanes, first
        return self.clock

    def queue_work(self, clock: int, run: Callable[[], None], line: int) -> None:
        """Queue an operation's work, which removes the operation from ``pending``."""
        self.pending.append(clock)

        def counted() -> None:
            self.pending.popleft()
            run()

        self._warp.issue("copies", self.queue, counted, line)

    def mark(self) -> int:
        """Advance the clock for later operations; returns the clock of all operations so far."""
        self.clock += 1
        return self.clock - 1

    def commit(self, lanes: int) -> None:
        """Close the open group, unless all of its operations belong to other lanes."""
        start = self._closed[-1] if self._closed else 0
        issuers = [bits for clock, (bits, _) in self._outstanding.items() if clock > start]
        if issuers and not any(bits & lanes for bits in issuers):
            return
        self._closed.append(self.mark())

    def until(self, allowed: int, lanes: int) -> int:
        """Clock that a wait by ``lanes`` covers if the ``allowed`` latest groups may be pending."""
        if allowed >= len(self._closed):
            return 0
        last = self._closed[-1 - allowed]
        foreign = [c for c, (bits, _) in self._outstanding.items() if bits & ~lanes and c <= last]
        return min(foreign) - 1 if foreign else last

    def wait(self, until: int, reads_only: bool, proxy: bool = True) -> None:
        """Complete the pending operations up to a clock; the warp is then ordered after them.

        Args:
            until: clock from :meth:`until`.
            reads_only: whether only the reads have to be complete.
            proxy: whether the async proxy made the copies, whose view of other writes needs a
                fence.
        """
        while self.pending and self.pending[0] <= until:
            self._warp.cta.cluster.units.step_queue(self.queue)
        actor = self._warp.actor
        actor.finished(self.reads, until)
        if not reads_only:
            actor.finished(self.writes, until, proxy=proxy)
        for clock in [clock for clock in self._outstanding if clock <= until]:
            del self._outstanding[clock]

    def unread(self) -> bool:
        """Whether any issued operation has never been waited for."""
        return bool(self._outstanding)

    def oldest(self) -> Where:
        return self._warp.where(self._outstanding[min(self._outstanding)][1])
