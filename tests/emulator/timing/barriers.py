"""mbarriers, CTA and cluster barriers in time: the phases of the functional run, replayed."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

from tests.emulator.machine.trace import CtaTrace, Event, Key


class MBarrier:
    """One mbarrier.

    Attributes:
        expected: arrivals of a phase.
        phase: phases completed.
    """

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self.pending = expected
        self.transactions = 0
        self.phase = 0
        self._waiters: list[tuple[int, Callable[[], None]]] = []

    def __str__(self) -> str:
        return (
            f"phase {self.phase}, {self.pending} of {self.expected} arrivals and "
            f"{self.transactions} bytes outstanding"
        )

    def arrive(self, count: int) -> None:
        self.pending -= count
        self._settle()

    def transact(self, nbytes: int) -> None:
        """Bytes expected, or with a minus sign completed."""
        self.transactions += nbytes
        self._settle()

    def wait(self, phase: int, wake: Callable[[], None]) -> bool:
        """Whether ``phase`` is complete; if not, ``wake`` is called once it is."""
        if self.phase > phase:
            return True
        self._waiters.append((phase, wake))
        return False

    def _settle(self) -> None:
        while self.pending <= 0 and self.transactions == 0:
            self.phase += 1
            self.pending += self.expected
            ready = [wake for phase, wake in self._waiters if phase < self.phase]
            self._waiters = [w for w in self._waiters if w[0] >= self.phase]
            for wake in ready:
                wake()


class Meeting:
    """One generation of a CTA or cluster barrier.

    Attributes:
        missing: warps that have not arrived.
        warps: that take part.
    """

    def __init__(self, warps: int) -> None:
        self.warps = warps
        self.missing = warps
        self._waiters: list[Callable[[], None]] = []

    def arrive(self) -> None:
        self.missing -= 1
        if not self.missing:
            waiters, self._waiters = self._waiters, []
            for wake in waiters:
                wake()

    def wait(self, wake: Callable[[], None]) -> bool:
        if not self.missing:
            return True
        self._waiters.append(wake)
        return False


def expected_arrivals(ctas: Iterable[CtaTrace]) -> dict[Key, int]:
    """How many arrivals make a phase of each mbarrier.

    From the trace's "init" events where it has them. Otherwise every warp that arrives on a barrier
    is taken to do so once a phase, lanes of one instruction together; and there are no more
    arrivals in a phase than the phases that were waited for allow.
    """
    phases: Counter[Key] = Counter()
    declared: dict[Key, int] = {}
    arrivals: Counter[Key] = Counter()
    times: defaultdict[Key, Counter[tuple[object, int]]] = defaultdict(Counter)
    for cta in ctas:
        for index, trace in enumerate(cta.warps):
            who = (cta.position, index)
            previous: object = None
            for item in trace:
                if isinstance(item, int):
                    previous = None
                    continue
                if item.kind == "init":
                    declared[item.key] = item.amount
                elif item.kind == "arrive":
                    arrivals[item.key] += item.amount
                    same = (item.line, item.key)
                    times[item.key][who] += same != previous
                    previous = same
                elif item.kind == "wait":
                    phases[item.key] = max(phases[item.key], item.amount + 1)
                elif item.kind == "commit":
                    for key in _keys(item):
                        arrivals[key] += 1
                        times[key][who] += 1
    inferred = {
        key: max(1, round(count / max(times[key].values(), default=1)))
        for key, count in arrivals.items()
    }
    for key, least in phases.items():
        if key in inferred and least:
            inferred[key] = max(1, min(inferred[key], arrivals[key] // least))
    return inferred | declared


def _keys(event: Event) -> tuple[Key, ...]:
    keys = event.detail
    assert isinstance(keys, tuple)
    return keys


def participants(ctas: Iterable[CtaTrace]) -> Counter[tuple[str, Key, int]]:
    """Warps that arrive in each generation of each CTA and cluster barrier."""
    found: Counter[tuple[str, Key, int]] = Counter()
    for cta in ctas:
        for trace in cta.warps:
            for item in trace:
                if isinstance(item, Event) and item.kind in ("barrier", "cluster_arrive"):
                    found[item.kind.split("_")[0], item.key, item.amount] += 1
    return found
