"""Timed mbarriers, CTA barriers and cluster barriers, which replay the phases of a run."""

from collections import Counter, deque
from collections.abc import Callable, Iterable

from tests.emulator.machine.trace import CtaTrace, Event, Key


class MBarrier:
    """One mbarrier.

    Attributes:
        expected: number of arrivals that complete a phase.
        phase: number of completed phases.
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

    def expect_more(self, count: int) -> None:
        """Expect additional arrivals, in this phase alone."""
        self.pending += count

    def drop(self, count: int) -> None:
        """Arrive, and reduce the expected arrivals of later phases."""
        self.expected -= count
        self.arrive(count)

    def transact(self, nbytes: int) -> None:
        """Expect ``nbytes`` more bytes; a negative number completes bytes."""
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
    """One generation of a CTA or cluster barrier, or one allocation of tensor memory.

    Attributes:
        missing: number of warps that have not arrived; of an allocation, SMs without columns.
        warps: number of participating warps, or of SMs.
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


class Columns:
    """Tensor memory columns of one SM: allocations wait, in order, until columns are free."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiters: deque[tuple[int, Callable[[], None]]] = deque()

    def take(self, count: int, wake: Callable[[], None]) -> bool:
        """Allocate columns if free; returns whether they were. Else ``wake`` is called later."""
        if self._waiters or count > self._free:
            self._waiters.append((count, wake))
            return False
        self._free -= count
        return True

    def give(self, count: int) -> None:
        self._free += count
        while self._waiters and self._waiters[0][0] <= self._free:
            count, wake = self._waiters.popleft()
            self._free -= count
            wake()


def expected_arrivals(ctas: Iterable[CtaTrace]) -> dict[Key, int]:
    """Number of arrivals in a phase of each mbarrier."""
    return {
        item.key: item.amount
        for cta in ctas
        for trace in cta.warps
        for item in trace
        if isinstance(item, Event) and item.kind == "init"
    }


def participants(ctas: Iterable[CtaTrace]) -> Counter[tuple[str, Key, int]]:
    """Number of warps that arrive in each generation of each CTA and cluster barrier."""
    found: Counter[tuple[str, Key, int]] = Counter()
    for cta in ctas:
        for trace in cta.warps:
            for item in trace:
                if isinstance(item, Event) and item.kind in ("barrier", "cluster_arrive"):
                    found[item.kind.split("_")[0], item.key, item.amount] += 1
    return found
