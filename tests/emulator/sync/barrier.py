"""CTA barriers 0-15 and the cluster barrier (PTX ISA: barrier{.cta}, barrier.cluster)."""

from collections.abc import Callable
from dataclasses import dataclass, field

from tests.emulator.findings import BarrierMisuse
from tests.emulator.memory.clocks import Clocks


@dataclass
class Barrier:
    """One of a CTA's sixteen barriers.

    Attributes:
        name: name in reports.
        expected: number of threads that this generation waits for, 0 before the first arrival.
        arrived: number of threads that have arrived.
        whole: whether the barrier waits for all threads of the CTA, without a stated count.
        generation: number of completed generations.
        handed: vector clocks that each recent generation hands to its waiters.
        votes: for each arrival in this generation, number of true predicates and of voters of
            bar.red.
        result: result of bar.red by completed generation.
    """

    name: str
    expected: int = 0
    arrived: int = 0
    whole: bool = False
    generation: int = 0
    handed: dict[int, Clocks] = field(default_factory=dict)
    votes: list[int] = field(default_factory=list)
    result: dict[int, tuple[int, int]] = field(default_factory=dict)
    waiters: list[Callable[[], None]] = field(default_factory=list)
    _arriving: Clocks = field(default_factory=Clocks)
    members: set[int] = field(default_factory=set)

    def __str__(self) -> str:
        return f"{self.name}: {self.arrived} of {self.expected} threads arrived"

    def arrive(
        self,
        warp: int,
        threads: int,
        expected: int,
        clocks: Clocks,
        votes: tuple[int, int] = (0, 0),
        whole: bool = False,
    ) -> int:
        """Count the arrival of one warp's threads.

        Args:
            warp: index of the arriving warp.
            threads: number of threads of the warp.
            expected: number of threads the instruction names, a multiple of 32.
            clocks: clocks that the warp releases.
            votes: number of true predicates and of voting threads of bar.red.
            whole: whether the instruction names no count; ``expected`` then counts the threads that
                have not exited.

        Returns:
            The generation the arrival belongs to.
        """
        if expected % 32 or expected <= 0:
            raise BarrierMisuse(
                f"{self.name}: thread count {expected} must be a positive multiple of 32"
            )
        if self.arrived and expected != self.expected:
            raise BarrierMisuse(
                f"{self.name}: this warp says {expected} threads, earlier ones {self.expected}"
            )
        if warp in self.members:
            raise BarrierMisuse(f"{self.name}: warp {warp} arrives twice in one generation")
        self.members.add(warp)
        self.expected = expected
        self.whole = whole
        self.arrived += threads
        self._arriving.join(clocks)
        self.votes.append(votes[0])
        self.votes.append(votes[1])
        generation = self.generation
        if self.arrived > expected:
            raise BarrierMisuse(f"{self}: more threads than the barrier waits for")
        self._settle()
        return generation

    def leave(self, threads: int) -> None:
        """Record a warp's exit: barriers for all threads stop waiting for it (PTX ISA, exit)."""
        if self.whole and self.arrived:
            self.expected -= threads
            self._settle()

    def _settle(self) -> None:
        generation = self.generation
        if self.arrived == self.expected:
            self.result[generation] = (sum(self.votes[::2]), sum(self.votes[1::2]))
            self.result.pop(generation - 4, None)
            self.votes = []
            self.members = set()
            self.arrived = self.expected = 0
            self.generation += 1
            self.handed[generation] = self._arriving
            self.handed.pop(generation - 4, None)
            self._arriving = Clocks()
            waiters, self.waiters = self.waiters, []
            for wake in waiters:
                wake()


@dataclass
class ClusterBarrier:
    """Barrier shared by all threads of a cluster; arrive and wait are separate.

    Attributes:
        expected: number of warps of the cluster that have not exited.
        arrived: warps that arrived in this generation.
    """

    expected: int
    arrived: set[tuple[int, int]] = field(default_factory=set)
    generation: int = 0
    handed: Clocks = field(default_factory=Clocks)
    waiters: list[Callable[[], None]] = field(default_factory=list)
    _arriving: Clocks = field(default_factory=Clocks)

    def __str__(self) -> str:
        return f"cluster barrier: {len(self.arrived)} of {self.expected} warps arrived"

    def arrive(self, warp: tuple[int, int], clocks: Clocks) -> int:
        """Count a warp's arrival; returns the generation."""
        if warp in self.arrived:
            raise BarrierMisuse(
                "barrier.cluster.arrive twice without a barrier.cluster.wait in between"
            )
        self.arrived.add(warp)
        self._arriving.join(clocks)
        generation = self.generation
        self._settle()
        return generation

    def leave(self) -> None:
        """Record the exit of a warp: the barrier stops waiting for it."""
        self.expected -= 1
        self._settle()

    def _settle(self) -> None:
        if self.expected and len(self.arrived) >= self.expected:
            self.arrived = set()
            self.generation += 1
            self.handed = self._arriving
            self._arriving = Clocks()
            waiters, self.waiters = self.waiters, []
            for wake in waiters:
                wake()
