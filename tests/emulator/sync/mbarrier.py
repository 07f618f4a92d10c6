"""mbarrier objects (PTX ISA, Parallel Synchronization: mbarrier)."""

from collections.abc import Callable

from tests.emulator.findings import BarrierMisuse
from tests.emulator.memory.clocks import Clocks

MAX_COUNT = 2**20 - 1


class MBarrier:
    """One mbarrier.

    Attributes:
        address: in the shared memory of its CTA.
        expected: arrivals of each phase.
        pending: arrivals the current phase still needs.
        transactions: bytes expected and not yet complete; may be negative within a phase.
        phase: phases completed.
        handed: what a wait on the last completed phase acquires.
        fenced: whether its initialisation has been published beyond the initialising thread.
        component: of the bulk copies that complete on it; their clock is ``phase + 1``.
        key: how traces call it.
    """

    def __init__(
        self, address: int, count: int, component: int, initialiser: tuple[int, int]
    ) -> None:
        if not 1 <= count <= MAX_COUNT:
            raise BarrierMisuse(f"mbarrier.init with count {count}, must be 1 to {MAX_COUNT}")
        self.address = address
        self.expected = count
        self.pending = count
        self.transactions = 0
        self.phase = 0
        self.handed = Clocks()
        self.fenced = False
        self.component = component
        self.key = ("mbarrier", component)
        self.initialiser = initialiser
        self._arriving = Clocks()
        self.waiters: list[Callable[[], None]] = []

    def __str__(self) -> str:
        return (
            f"mbarrier at shared {self.address:#x}: phase {self.phase}, {self.pending} of "
            f"{self.expected} arrivals and {self.transactions} bytes outstanding"
        )

    def done(self, parity: int) -> bool:
        """Whether the phase of ``parity`` (0 for the first) has completed."""
        return (self.phase & 1) != parity

    def expect(self, nbytes: int) -> None:
        self._transact(nbytes)

    def arrive(self, clocks: Clocks | None, count: int = 1) -> int:
        """Counts arrivals; returns the phase they belong to."""
        phase = self.phase
        if count < 1:
            raise BarrierMisuse(f"arrival with count {count} on {self}")
        if count > self.pending:
            raise BarrierMisuse(f"{count} arrival(s) more than expected on {self}")
        if clocks is not None:
            self._arriving.join(clocks)
        self.pending -= count
        self._settle()
        return phase

    def complete(self, nbytes: int, clocks: Clocks | None = None) -> None:
        """A copy's bytes are there."""
        self._arriving.generic[self.component] = self.phase + 1
        if clocks is not None:
            self._arriving.join(clocks)
        self._transact(-nbytes)
        self._settle()

    def drop(self, clocks: Clocks | None, count: int = 1) -> int:
        """mbarrier.arrive_drop: arrivals now, and as many fewer in all later phases."""
        if count > self.expected:
            raise BarrierMisuse(f"arrive_drop of {count} on {self}")
        self.expected -= count
        return self.arrive(clocks, count)

    def _transact(self, nbytes: int) -> None:
        self.transactions += nbytes
        if not -MAX_COUNT <= self.transactions <= MAX_COUNT:
            raise BarrierMisuse(
                f"transaction count {self.transactions} of {self} leaves its range of {MAX_COUNT}"
            )

    def _settle(self) -> None:
        if self.pending or self.transactions:
            return
        self.phase += 1
        self.pending = self.expected
        # Phases follow one another: what an earlier one handed over stays handed over.
        self.handed.join(self._arriving)
        self._arriving = Clocks()
        waiters, self.waiters = self.waiters, []
        for wake in waiters:
            wake()
