"""Progress of one launch over the chip: when its clusters may start, and the path of its bytes."""

from collections import Counter, deque
from collections.abc import Callable

from tests.emulator.machine.trace import Key, Touched
from tests.emulator.timing.caches import L1
from tests.emulator.timing.chip import Chip, Sm
from tests.emulator.timing.prepared import Cluster, Prepared
from tests.emulator.timing.supply import Supply


class Ordered:
    """Launch in a stream: its predecessor, and the time when the next launch may open.

    Args:
        chip: chip of the launch.
        label: name of the launch.
        dependent: whether the launch may start before its predecessor has ended.

    Attributes:
        opened, ended: cycles at which clusters may start, and at which all writes are done.
        complete: whether the launch's writes are visible to a grid that waits for the launch.
        before: the preceding launch.
        hbm: number of bytes that the launch reads from HBM.
    """

    hbm: float

    def __init__(self, chip: Chip, label: str, dependent: bool) -> None:
        self.chip = chip
        self.label = label
        self.dependent = dependent
        self.opened = self.ended = 0.0
        self.complete = False
        self.before: Ordered | None = None
        self._released: Callable[[], None] | None = None
        self._lets_open = False
        self._waiters: list[Callable[[], None]] = []

    def on_release(self, act: Callable[[], None]) -> None:
        """Call ``act`` once the next launch may open."""
        self._released = act
        if self._lets_open:
            self.let_next_open()

    def let_next_open(self) -> None:
        """Let the next launch open."""
        self._lets_open = True
        if self._released is not None:
            act, self._released = self._released, None
            act()

    def wait(self, wake: Callable[[], None]) -> bool:
        """Whether this grid is complete; if not, ``wake`` is called once it is."""
        if self.complete:
            return True
        self._waiters.append(wake)
        return False

    def finish(self) -> None:
        """Make the grid's writes visible from now on."""
        self.complete = True
        for wake in self._waiters:
            wake()


class Grid(Ordered):
    """Launch of traced clusters.

    Args:
        chip: chip of the launch.
        prepared: the launch.
        supply: source of the bytes that the launch reads.
        clusters: traces, in the order of their start.
        dependent: whether the launch may start before its predecessor has ended.
        scale: number of bytes of L2 and HBM traffic that each byte of a simulated cluster stands
            for.
        label: name of the launch; empty for the kernel's name.

    Attributes:
        waiting: (number, traces, repetition) of clusters that have not started, the next last.
    """

    def __init__(
        self,
        chip: Chip,
        prepared: Prepared,
        supply: Supply,
        clusters: list[Cluster],
        dependent: bool = False,
        scale: float = 1.0,
        label: str = "",
    ) -> None:
        super().__init__(chip, label or prepared.launch.program.kernel.name, dependent)
        self.prepared = prepared
        self.supply = supply
        self.hbm = supply.hbm
        self.scale = scale
        self.prefix = f"{label}: " if label else ""  # prefix of the warps' names
        repetitions: Counter[int] = Counter()
        order = []
        for number, cluster in enumerate(clusters):
            order.append((number, cluster, repetitions[id(cluster)]))
            repetitions[id(cluster)] += 1
        self.waiting = order[::-1]
        self.running = len(clusters)
        self._holding = {(n, cta.rank) for n, cluster in enumerate(clusters) for cta in cluster}
        self._caches: dict[int, L1] = {}
        self._prefetched: dict[tuple[int, int], deque[list[float]]] = {}
        self._maps: dict[tuple[int, Key], float] = {}

    def release(self, cluster: int, rank: int) -> None:
        """Count a CTA that has executed launch_dependents or ended."""
        self._holding.discard((cluster, rank))
        if not self._holding and not self._lets_open:
            self.let_next_open()

    # Memory

    def l1(self, sm: Sm) -> L1:
        """L1 of an SM, as filled by this grid's loads."""
        found = self._caches.get(sm.number)
        if found is None:
            found = self._caches[sm.number] = L1(self.prepared.l1_bytes)
        return found

    def fetch(self, sm: Sm, at: float, where: Touched, nbytes: float, filled: float = 0.0) -> float:
        """Request bytes at ``at``; returns the cycle when all have arrived from L2 and HBM.

        The share of prefetched bytes waits for the oldest prefetches of the SM.

        Args:
            sm: requesting SM.
            at: cycle of the request.
            where: place of the bytes.
            nbytes: bytes of whole sectors.
            filled: cycle when the path from L2 has passed all bytes.
        """
        chip, p = self.chip, self.chip.p
        operand = self.supply.operand_of(where)
        hits = self.supply.hits(operand)
        missing = nbytes * hits.miss
        # Bytes from HBM take L2's bandwidth on arrival, not ahead of L2's hits.
        _, end = chip.l2.serve(at, (nbytes - missing) * self.scale)
        end = max(end, filled)
        latency = p.l2_latency
        if missing:
            end = max(end, chip.hbm.serve(at, missing * self.scale))
            latency += hits.miss * p.hbm_latency
        early = self._prefetched.get((sm.number, operand))
        if not early:
            return end + latency
        return max(end + latency, self._taken(early, nbytes * hits.prefetched))

    def _taken(self, early: deque[list[float]], nbytes: float) -> float:
        """Take ``nbytes`` from the oldest prefetches; returns the cycle of their arrival from L2.

        ``early``: (cycle of arrival in L2, bytes) of each prefetch.
        """
        ready = 0.0
        while nbytes > 0 and early:
            oldest = early[0]
            ready = oldest[0] + self.chip.p.l2_latency
            taken = min(nbytes, oldest[1])
            nbytes -= taken
            oldest[1] -= taken
            if not oldest[1]:
                early.popleft()
        return ready

    def prefetch(self, sm: Sm, at: float, where: Touched, nbytes: float) -> None:
        """Prefetch bytes from HBM to L2."""
        operand = self.supply.operand_of(where)
        missing = self.supply.hits(operand).prefetch_miss
        end = at
        if missing:
            end = self.chip.hbm.serve(at, nbytes * missing * self.scale)
        early = self._prefetched.setdefault((sm.number, operand), deque())
        early.append([end + missing * self.chip.p.hbm_latency, nbytes])

    def map_ready(self, sm: Sm, tensor_map: Key, at: float) -> float:
        """Cycle when an SM has a tensor map that it needs at ``at``; its first need fetches it."""
        return self._maps.setdefault((sm.number, tensor_map), at + self.chip.p.map_fetch_latency)

    def write(self, at: float, nbytes: float) -> float:
        """Write bytes sent at ``at`` to L2 and HBM; returns the cycle when L2 has accepted them.

        L2 accepts bytes when an HBM bank begins to write them; the end of the write delays nothing.
        """
        chip, nbytes = self.chip, nbytes * self.scale
        _, end = chip.l2.serve(at, nbytes)
        written = chip.hbm.serve(at, nbytes * chip.p.hbm_write_cost)
        return max(end, written - chip.p.hbm_bank_time)
