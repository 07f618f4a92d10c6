"""Asynchronous work in flight: queues that complete in order, at times set by the schedule."""

from collections import deque
from collections.abc import Callable, Hashable

from tests.emulator.machine.schedule import Schedule

Work = Callable[[], None]


class Units:
    """Queues of work: each queue completes in order, independently of the other queues."""

    def __init__(self, schedule: Schedule) -> None:
        self._policy = {"copies": schedule.copies, "tensor": schedule.tensor}
        self._random = schedule.random()
        self._queues: dict[Hashable, deque[Work]] = {}

    def issue(self, unit: str, queue: Hashable, work: Work) -> None:
        """Queue work of ``unit`` ("copies" or "tensor"); eager work runs at once if none waits."""
        if self._policy[unit] == "eager" and queue not in self._queues:
            work()
        else:
            self._queues.setdefault(queue, deque()).append(work)

    def step_queue(self, queue: Hashable) -> None:
        """Complete the oldest work of one queue."""
        self._step(queue)

    @property
    def idle(self) -> bool:
        return not self._queues

    def may_step(self) -> bool:
        """Whether to complete an operation early: a random draw, if the schedule is random."""
        return (
            bool(self._queues) and "random" in self._policy.values() and self._random.random() < 0.5
        )

    def step(self) -> None:
        """Complete one operation: the oldest, or a random one."""
        queues = list(self._queues)
        random = "random" in self._policy.values()
        self._step(self._random.choice(queues) if random else queues[0])

    def _step(self, queue: Hashable) -> None:
        waiting = self._queues[queue]
        work = waiting.popleft()
        if not waiting:
            del self._queues[queue]
        work()
