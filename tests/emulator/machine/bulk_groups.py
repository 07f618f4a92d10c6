"""Bulk and cp.async groups of a warp: what commit_group closes and wait_group waits for."""

from collections import deque
from typing import TYPE_CHECKING

from tests.emulator.findings import Where
from tests.emulator.memory.clocks import Events

if TYPE_CHECKING:
    from tests.emulator.machine.warp import Warp


class BulkGroups:
    """Groups of one kind of asynchronous copy, in order.

    Operations of a group are tagged with two components: ``reads`` (their sources have been read)
    and ``writes`` (their results are visible). Waiting for a group makes the warp come after its
    clock.

    Attributes:
        reads, writes: components.
        open: number of the group that operations join now, from 1.
        pending: groups of operations that have not run yet, in order.
    """

    def __init__(self, warp: "Warp", events: Events) -> None:
        self._warp = warp
        self.reads = events.new_component()
        self.writes = events.new_component()
        self.open = 1
        self.read_until = 0
        self.written_until = 0
        self.pending: deque[int] = deque()
        self._lines: dict[int, int] = {}
        self.queue = ("group", self.reads)

    def issued(self, line: int) -> int:
        """An operation joins the open group; returns the group's number, its clock."""
        self._lines.setdefault(self.open, line)
        return self.open

    def commit(self) -> None:
        self.open += 1

    def waited(self, allowed: int, reads_only: bool) -> None:
        """All but the latest ``allowed`` groups are done; the warp comes after them."""
        until = self.open - 1 - allowed
        actor = self._warp.actor
        actor.finished(self.reads, until)
        if not reads_only:
            actor.finished(self.writes, until)
        self.read_until = max(self.read_until, until)
        if not reads_only:
            self.written_until = max(self.written_until, until)

    def unread(self) -> bool:
        """Whether an operation was issued that nobody waited for."""
        return any(group > self.read_until for group in self._lines)

    def oldest(self) -> Where:
        group = min(g for g in self._lines if g > self.read_until)
        return self._warp.where(self._lines[group])
