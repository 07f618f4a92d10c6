"""Simulated time: an event queue, and servers that process requests in order."""

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush


class Engine:
    """Event queue that runs actions in the order of their times; ``now`` is the time in cycles."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, time: float, action: Callable[[], None]) -> None:
        self._count += 1
        heappush(self._queue, (max(time, self.now), self._count, action))

    def run(self) -> None:
        queue = self._queue
        while queue:
            self.now, _, action = heappop(queue)
            action()


@dataclass
class Server:
    """A unit that serves requests in order of arrival.

    Attributes:
        rate: work per cycle.
        free: cycle at which the next request can begin.
        busy: cycles of work so far.
        work: amount of work so far.
    """

    rate: float = 1.0
    free: float = 0.0
    busy: float = 0.0
    work: float = 0.0

    def serve(self, at: float, work: float) -> tuple[float, float]:
        """Serve a request that arrives at ``at``; returns the cycles of its beginning and end."""
        start = max(at, self.free)
        cycles = work / self.rate
        self.free = start + cycles
        self.busy += cycles
        self.work += work
        return start, self.free
