"""The units of an SM and of the whole chip, as servers."""

import math
from collections import defaultdict, deque
from random import Random
from typing import NamedTuple

from tests.emulator.timing.barriers import Columns
from tests.emulator.timing.caches import L1
from tests.emulator.timing.engine import Engine, Server
from tests.emulator.timing.issue import Scheduler
from tests.emulator.timing.parameters import Parameters
from tests.emulator.timing.timeline import Timeline

QUARTERS = 4  # of tensor memory's lanes; a warp reaches those of its number modulo 4


class Sm:
    """One streaming multiprocessor.

    Attributes:
        number: among the simulated ones.
        schedulers: its warp schedulers.
        tensor: MMA pipe, in cycles; ``tensor_copies`` does tcgen05.cp.
        tma: copy engine, in rows of 128 bytes.
        fills, stores: the ways in from L2, of loads and cp.async, and out to it, in bytes.
        shared: port of loads and stores to shared memory and L1, in passes of 128 bytes.
        l1: what loads of global memory have left there.
        columns: of tensor memory.
        prefetched: (when it is in L2, bytes) of prefetches whose data no load has taken yet.
        reads, writes: tensor memory's ports, one for each quarter of the lanes, in registers.
        shared_bytes: moved in or out of shared memory by whatever unit.
        timeline: what is recorded of it, or None.
    """

    def __init__(
        self, number: int, engine: Engine, p: Parameters, l1: float, timeline: Timeline | None
    ) -> None:
        self.number = number
        self.schedulers = [Scheduler(engine) for _ in range(int(p.schedulers))]
        self.tensor = Server()
        self.tensor_copies = Server(p.tensor_copy_bandwidth)
        self.tma = Server(1 / p.tma_row_interval)
        self.fills = Server(p.fill_bandwidth)
        self.stores = Server(p.store_bandwidth)
        self.shared = Server()
        self.l1 = L1(l1)
        self.columns = Columns(int(p.tensor_columns))
        self.prefetched: deque[list[float]] = deque()
        self.reads = [Server(1 / p.tensor_read_interval) for _ in range(QUARTERS)]
        self.writes = [Server(1 / p.tensor_write_interval) for _ in range(QUARTERS)]
        self.shared_bytes = 0.0
        self.timeline = timeline
        self._shared_bandwidth = p.shared_bandwidth

    def busy(self) -> dict[str, float]:
        """Cycles of work by unit; those of several alike are averaged."""
        found: defaultdict[str, float] = defaultdict(float)
        for scheduler in self.schedulers:
            for pipe, cycles in scheduler.used.items():
                found[pipe] += cycles / len(self.schedulers)
        found["tensor core"] = self.tensor.busy
        found["tensor memory copy"] = self.tensor_copies.busy
        found["tensor memory read"] = sum(s.busy for s in self.reads) / QUARTERS
        found["tensor memory write"] = sum(s.busy for s in self.writes) / QUARTERS
        found["TMA"] = self.tma.busy
        found["L2 to L1"] = self.fills.busy
        found["stores to L2"] = self.stores.busy
        found["load and store"] = self.shared.busy
        found["shared memory"] = self.shared_bytes / self._shared_bandwidth
        return found


class Banks:
    """HBM: bytes go piece by piece to many banks, so that some wait while other banks idle.

    A piece goes to the less busy of two banks, which stands for what reorders requests.

    Attributes:
        work: bytes so far.
    """

    def __init__(self, rate: float, piece: float, time: float) -> None:
        count = max(1, round(rate * time / piece))
        self._banks = [Server(rate / count) for _ in range(count)]
        self._piece, self._time = piece, time
        self._chance = Random(0)
        self.work = 0.0

    def serve(self, at: float, nbytes: float) -> float:
        """Cycle when bytes asked for at ``at`` have all been served."""
        self.work += nbytes
        pieces = math.ceil(nbytes / self._piece)
        pairs = self._chance.choices(self._banks, k=2 * pieces)
        begun = max(
            (one if one.free < two.free else two).serve(at, nbytes / pieces)[0]
            for one, two in zip(pairs[::2], pairs[1::2], strict=True)
        )
        return begun + self._time


class Hits(NamedTuple):
    """Shares of the bytes read, by where they come from.

    Attributes:
        miss: of loads' bytes, from HBM.
        prefetched: of loads' bytes, what prefetches have asked for before.
        prefetch_miss: of prefetched bytes, from HBM.
    """

    miss: float = 0.0
    prefetched: float = 0.0
    prefetch_miss: float = 0.0


class Chip:
    """The SMs that are simulated, and their share of what the whole chip has.

    Args:
        engine: of the simulation.
        p: parameters.
        sms: how many to simulate.
        share: part of L2's and HBM's bandwidth that is theirs.
        hits: what comes from where.
        l1: bytes of an SM's L1.
        observed: SMs to record a timeline of.

    Attributes:
        l2, hbm: in bytes.
    """

    def __init__(
        self,
        engine: Engine,
        p: Parameters,
        sms: int,
        share: float,
        hits: Hits,
        l1: float,
        observed: dict[int, Timeline],
    ) -> None:
        self.engine = engine
        self.p = p
        self.hits = hits
        self.l2 = Server(p.per_cycle(p.l2_bandwidth) * share)
        bandwidth = p.per_cycle(p.hbm_bandwidth) * share
        self.hbm = Banks(bandwidth, p.hbm_piece, p.hbm_bank_time)
        self.sms = [Sm(n, engine, p, l1, observed.get(n)) for n in range(sms)]
        self.flops = 0.0

    def fetch(self, sm: Sm, at: float, nbytes: float, filled: float = 0.0) -> float:
        """Cycle when bytes asked for at ``at`` have all come from L2 and HBM.

        A part of them waits for the oldest prefetches of the SM that nobody has waited for.

        Args:
            sm: that asks.
            at: cycle.
            nbytes: of whole sectors.
            filled: when its way from L2 has let them all through.
        """
        _, end = self.l2.serve(at, nbytes)
        end = max(end, filled)
        latency = self.p.l2_latency
        miss = self.hits.miss
        if miss:
            end = max(end, self.hbm.serve(at, nbytes * miss))
            latency += miss * self.p.hbm_latency
        return max(end + latency, self._prefetched(sm, nbytes * self.hits.prefetched))

    def _prefetched(self, sm: Sm, nbytes: float) -> float:
        ready = 0.0
        while nbytes > 0 and sm.prefetched:
            oldest = sm.prefetched[0]
            ready = oldest[0] + self.p.l2_latency
            taken = min(nbytes, oldest[1])
            nbytes -= taken
            oldest[1] -= taken
            if not oldest[1]:
                sm.prefetched.popleft()
        return ready

    def prefetch(self, sm: Sm, at: float, nbytes: float) -> None:
        """Bytes come from HBM to L2."""
        end = at
        if self.hits.prefetch_miss:
            end = self.hbm.serve(at, nbytes * self.hits.prefetch_miss)
        sm.prefetched.append([end + self.hits.prefetch_miss * self.p.hbm_latency, nbytes])

    def write(self, at: float, nbytes: float) -> float:
        """Cycle when bytes sent at ``at`` have been taken; what is written goes on to HBM.

        L2 takes them when a bank begins with them: nobody waits until it has ended.
        """
        _, end = self.l2.serve(at, nbytes)
        written = self.hbm.serve(at, nbytes * self.p.hbm_write_cost)
        return max(end, written - self.p.hbm_bank_time)
