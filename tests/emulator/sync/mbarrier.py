"""mbarrier objects (PTX ISA, Parallel Synchronization: mbarrier)."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from tests.emulator.findings import BarrierMisuse, ParityAliasing, Where
from tests.emulator.memory.clocks import Actor, Clock, Clocks, Report, join

MAX_COUNT = 2**20 - 1


class Sender(Enum):
    """Threads that an arrival comes from, as far as an acquire of it is concerned."""

    NEAR = "of the mbarrier's CTA"
    PEER = "of another CTA, with cluster scope"
    PEER_NARROW = "of another CTA, with a scope that leaves out the mbarrier's"
    RELAXED = "any, and nothing is released"


@dataclass
class Arrivals:
    """Arrivals of one phase: who knows of all of them knows that it is complete.

    Attributes:
        over: by component, the clock from which on whatever it hands over comes after its arrival.
        untold: whether it takes more than those: bytes, or arrivals that nothing else tells of.
    """

    over: Clock = field(default_factory=dict)
    untold: bool = False

    def known_to(self, actor: Actor) -> bool:
        """Whether a warp has made them, or comes after them."""
        return not self.untold and all(
            component == actor.component or actor.knows(component, clock)
            for component, clock in self.over.items()
        )


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
        component: of its phases, and of the bulk copies that complete on it; their clock is
            ``phase + 1``.
        key: how traces call it.
        arrivals: those of the last two completed phases, the latest last.
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
        self._arrivals = Arrivals()  # of the current phase
        self._arriving = Clocks()
        self._report = report
        self._near: Clock = {}  # what threads of its own CTA have handed over
        self._peers = False  # whether others have
        self._relaxed = False  # whether this phase has an arrival that hands over nothing
        # Who has waited for the phase before the current one: clock after the wait, and where.
        self._waited: dict[int, tuple[int, Callable[[], Where]]] = {}

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

    def handed_to(self, wide: bool) -> Clocks:
        """Clocks that a wait acquires, with cluster scope if ``wide``, else with the CTA's."""
        if wide or not self._peers:
            return self.handed
        found = self.handed.copy()
        for component, clock in found.generic.items():
            known = self._near.get(component, 0)
            if known < clock:
                found.narrow[component] = min(known, found.narrow.get(component, known))
        return found

    def waited(self, component: int, clock: int, where: Callable[[], Where]) -> None:
        """Notes that a wait for the last completed phase is over."""
        self._waited[component] = clock, where

    def known_complete(self, phase: int, actor: Actor) -> bool:
        """Whether a warp comes after every arrival of ``phase``."""
        back = self.phase - phase  # 1: the phase that has just completed
        return 0 < back <= len(self.arrivals) and self.arrivals[-back].known_to(actor)

    def arrive(
        self,
        clocks: Clocks,
        count: int = 1,
        sender: Sender = Sender.NEAR,
        over: tuple[int, int] | None = None,
    ) -> int:
        """Counts arrivals; returns the phase they belong to.

        Args:
            clocks: what they hand over.
            count: how many.
            sender: whose they are.
            over: component, and its clock from which on it hands over that they have been made;
                None where nothing but the phase itself tells.
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
        """Counts the bytes of a copy, issued by this CTA if ``near``."""
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
        """mbarrier.arrive_drop: arrivals now, and as many fewer in all later phases."""
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
        # Phases follow one another: what an earlier one handed over stays handed over.
        self.handed.join(self._arriving)
        self._arriving = Clocks()
        waiters, self.waiters = self.waiters, []
        for wake in waiters:
            wake()

    def _check_waits(self) -> None:
        """Whoever waited for the last phase was done before the current one could complete."""
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
