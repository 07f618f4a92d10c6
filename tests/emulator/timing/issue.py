"""Warp scheduler: warps that run at the same time share its issue slots and pipes.

Sharing is fluid: a segment, which takes ``length`` cycles alone, proceeds at a rate of 1, or less
while the running warps together exceed the throughput of a pipe. Warps get equal shares of a pipe,
and unused shares go to the other warps, as in a loose round robin.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from tests.emulator.timing.engine import Engine
from tests.emulator.timing.segments import Segment


@dataclass(eq=False, slots=True)
class _Job:
    left: float
    demand: dict[str, float]
    done: Callable[[], None]
    rate: float = 1.0


class Scheduler:
    """Warp scheduler of an SM, with the pipes behind the scheduler.

    Attributes:
        used: number of cycles taken so far, by pipe.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._jobs: list[_Job] = []
        self._since = 0.0
        self._plan = 0
        self.used: defaultdict[str, float] = defaultdict(float)

    def start(self, segment: Segment, done: Callable[[], None]) -> None:
        """Run a segment of one warp; calls ``done`` at its end."""
        length = segment.length
        for pipe, cycles in segment.slots.items():
            self.used[pipe] += cycles
        self._catch_up()
        demand = {pipe: min(1.0, cycles / length) for pipe, cycles in segment.slots.items()}
        self._jobs.append(_Job(length, demand, done))
        self._share()

    def _catch_up(self) -> None:
        passed = self._engine.now - self._since
        self._since = self._engine.now
        if passed > 0:
            for job in self._jobs:
                job.left -= passed * job.rate

    def _share(self) -> None:
        jobs = self._jobs
        self._plan += 1
        if not jobs:
            return
        if len(jobs) == 1:
            jobs[0].rate = 1.0
            soonest = jobs[0].left
        else:
            share_pipes(jobs)
            soonest = min(job.left / job.rate for job in jobs)
        plan = self._plan
        self._engine.at(self._engine.now + soonest, lambda: self._finish(plan))

    def _finish(self, plan: int) -> None:
        if plan != self._plan:
            return
        self._catch_up()
        ended = [job for job in self._jobs if job.left <= 1e-6]
        self._jobs = [job for job in self._jobs if job.left > 1e-6]
        self._share()
        for job in ended:
            job.done()


def share_pipes(jobs: list[_Job]) -> None:
    """Set the rates of jobs: pipe by pipe, the most requested pipe first, in equal shares."""
    wanted: defaultdict[str, float] = defaultdict(float)
    for job in jobs:
        job.rate = 1.0
        for pipe, demand in job.demand.items():
            wanted[pipe] += demand
    for pipe, total in sorted(wanted.items(), key=lambda item: -item[1]):
        if total <= 1.0:
            return
        users = sorted(
            (job for job in jobs if pipe in job.demand), key=lambda job: job.demand[pipe] * job.rate
        )
        left = 1.0
        for position, job in enumerate(users):
            use = job.demand[pipe] * job.rate
            share = left / (len(users) - position)
            if use > share:
                job.rate *= share / use
                use = share
            left -= use
