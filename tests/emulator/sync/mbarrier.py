"""mbarrier objects (PTX ISA, Parallel Synchronization: mbarrier)."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from tests.emulator.findings import BarrierMisuse, ParityAliasing, Where
from tests.emulator.memory.clocks import Actor, Clock, Clocks, Report, join

MAX_COUNT = 2**20 - 1


class Sender(Enum):
    """Sender of an arrival, by CTA and scope, which decide the waits that acquire its clocks."""

    NEAR = "of the mbarrier's CTA"
    PEER = "of another CTA, with cluster scope"
    PEER_NARROW = "of another CTA, with a scope that leaves out the mbarrier's"
    RELAXED = "any, and nothing is released"


@dataclass
class Arrivals:
    """Arrivals of one phase; an actor ordered after all of them knows that the phase is complete.

    Attributes:
        over: by component, the clock from which on a release by the component implies its arrivals.
        untold: whether the phase also needs transferred bytes, or arrivals that no clock implies.
    """

    over: Clock = field(default_factory=dict)
    untold: bool = False

    def known_to(self, actor: Actor) -> bool:
        """Whether an actor has made the arrivals, or is ordered after them."""
        return not self.untold and all(
            component == actor.component or actor.knows(component, clock)
            for component, clock in self.over.items()
        )


class MBarrier:
    """One mbarrier.

    Attributes:
        address: address in the shared memory of its CTA.
        expected: number of arrivals that complete a phase.
        pending: number of arrivals that the current phase still needs.
        transactions: bytes expected and not yet complete; may be negative within a phase.
        phase: number of completed phases.
        handed: vector clocks that a wait on the last completed phase acquires.
        fenced: whether the initialisation has been published beyond the initialising thread.
        component: component of the phases, and of the bulk copies that complete on the mbarrier;
            the clock is ``phase + 1``.
        key: identifier in traces.
        arrivals: arrivals of the last two completed phases, the latest last.
    """

    def __init__(
        self,
        address: int,
        count: int,
        component: int,
        initialiser: tuple[int, int],
        report: Report,
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
        self.waiters: list[Callable[[], None]] = []
        self.arrivals: deque[Arrivals] = deque(maxlen=2)
        self._arrivals = Arrivals()  # arrivals of the current phase
        self._arriving = Clocks()
        self._report = report
        self._near: Clock = {}  # clocks released by threads of the same CTA
        self._peers = False  # whether threads of other CTAs have arrived
        self._relaxed = False  # whether this phase has a relaxed arrival
        # Waits for the preceding phase: component -> clock after the wait, and place.
        self._waited: dict[int, tuple[int, Callable[[], Where]]] = {}

    def __str__(self) -> str:
        return (
            f"mbarrier at shared {self.address:#x}: phase {self.phase}, {self.pending} of "
            f"{self.expected} arrivals and {self.transactions} bytes outstanding"
        )

    @property
    def is_underway(self) -> bool:
        """Whether the current phase has had arrivals, or expects bytes."""
        return self.pending < self.expected or self.transactions != 0

    def done(self, parity: int) -> bool:
        """Whether the phase of ``parity`` (0 for the first) has completed."""
        return (self.phase & 1) != parity

    def expect(self, nbytes: int) -> None:
        self._transact(nbytes)

    def handed_to(self, wide: bool) -> Clocks:
        """Clocks that a wait acquires, at cluster scope if ``wide``, else at CTA scope."""
        if wide or not self._peers:
            return self.handed
        found = self.handed.copy()
        for component, clock in found.generic.items():
            known = self._near.get(component, 0)
            if known < clock:
                found.narrow[component] = min(known, found.narrow.get(component, known))
        return found

    def waited(self, component: int, clock: int, where: Callable[[], Where]) -> None:
        """Note the end of a wait for the last completed phase."""
        self._waited[component] = clock, where

    def known_complete(self, phase: int, actor: Actor) -> bool:
        """Whether a warp is ordered after every arrival of ``phase``."""
        back = self.phase - phase  # 1: the phase that has just completed
        return 0 < back <= len(self.arrivals) and self.arrivals[-back].known_to(actor)

    def arrive(
        self,
        clocks: Clocks,
        count: int = 1,
        sender: Sender = Sender.NEAR,
        over: tuple[int, int] | None = None,
    ) -> int:
        """Count arrivals; returns the phase of the arrivals.

        Args:
            clocks: clocks that the arrivals release.
            count: number of arrivals.
            sender: kind of the arriving party.
            over: a component and a clock: later releases of the component imply the arrivals; None
                if only the phase itself implies the arrivals.
        """
        phase = self.phase
        if count < 1:
            raise BarrierMisuse(f"arrival with count {count} on {self}")
        if count > self.pending:
            raise BarrierMisuse(f"{count} arrival(s) more than expected on {self}")
        self._receive(clocks, sender)
        if over is None:
            self._arrivals.untold = True
        else:
            join(self._arrivals.over, dict([over]))
        self.pending -= count
        self._settle()
        return phase

    def complete(self, nbytes: int, clocks: Clocks | None = None, near: bool = True) -> None:
        """Count the transferred bytes of a copy, which this CTA issued if ``near``."""
        self._arriving.generic[self.component] = self.phase + 1
        if clocks is not None:
            self._receive(clocks, Sender.NEAR if near else Sender.PEER)
        self._transact(-nbytes)
        self._settle()

    def drop(
        self,
        clocks: Clocks,
        count: int = 1,
        sender: Sender = Sender.NEAR,
        over: tuple[int, int] | None = None,
    ) -> int:
        """mbarrier.arrive_drop: arrive, and reduce the count of all later phases by ``count``."""
        if count > self.expected:
            raise BarrierMisuse(f"arrive_drop of {count} on {self}")
        self.expected -= count
        return self.arrive(clocks, count, sender, over)

    def _receive(self, clocks: Clocks, sender: Sender) -> None:
        self._arriving.join(clocks.narrowed() if sender is Sender.PEER_NARROW else clocks)
        if sender is Sender.NEAR:
            join(self._near, clocks.generic)
        elif sender is Sender.RELAXED:
            self._relaxed = True
        else:
            self._peers = True

    def _transact(self, nbytes: int) -> None:
        self._arrivals.untold = True
        self.transactions += nbytes
        if not -MAX_COUNT <= self.transactions <= MAX_COUNT:
            raise BarrierMisuse(
                f"transaction count {self.transactions} of {self} leaves its range of {MAX_COUNT}"
            )

    def _settle(self) -> None:
        if self.pending or self.transactions:
            return
        if not self._relaxed:
            self._check_waits()
        self._waited = {}
        self._relaxed = False
        self.phase += 1
        self._arriving.generic[self.component] = self.phase
        self._near[self.component] = self.phase
        self.pending = self.expected
        self.arrivals.append(self._arrivals)
        self._arrivals = Arrivals()
        # Phases are ordered: clocks handed over by an earlier phase stay handed over.
        self.handed.join(self._arriving)
        self._arriving = Clocks()
        waiters, self.waiters = self.waiters, []
        for wake in waiters:
            wake()

    def _check_waits(self) -> None:
        """Check that waits for the last phase ended before the current phase could complete."""
        for component, (clock, where) in self._waited.items():
            if self._arriving.generic.get(component, 0) < clock:
                self._report(
                    ParityAliasing(
                        f"phase {self.phase} of the {self} completes, and nothing orders that "
                        f"after this wait for phase {self.phase - 1}: a warp that is late meets "
                        "the parity of the phase after",
                        where(),
                    )
                )
