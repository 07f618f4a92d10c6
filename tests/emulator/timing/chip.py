"""The units of an SM and of the whole chip, as servers."""

from collections import defaultdict

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
        tma: copy engine, in rows of 128 bytes; ``stores`` its way out, in bytes.
        shared: shared memory's port of loads and stores, in passes of 128 bytes.
        reads, writes: tensor memory's ports, one for each quarter of the lanes, in registers.
        shared_bytes: moved in or out of shared memory by whatever unit.
        timeline: what is recorded of it, or None.
    """

    def __init__(
        self, number: int, engine: Engine, p: Parameters, timeline: Timeline | None
    ) -> None:
        self.number = number
        self.schedulers = [Scheduler(engine) for _ in range(int(p.schedulers))]
        self.tensor = Server()
        self.tensor_copies = Server(p.tensor_copy_bandwidth)
        self.tma = Server(1 / p.tma_row_interval)
        self.stores = Server(p.tma_store_bandwidth)
        self.shared = Server()
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
        found["TMA store"] = self.stores.busy
        found["shared memory"] = self.shared_bytes / self._shared_bandwidth
        return found


class Chip:
    """The SMs that are simulated, and their share of what the whole chip has.

    Args:
        engine: of the simulation.
        p: parameters.
        sms: how many to simulate.
        share: part of L2's and HBM's bandwidth that is theirs.
        miss: part of the bytes read that comes from HBM.
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
        miss: float,
        observed: dict[int, Timeline],
    ) -> None:
        self.engine = engine
        self.p = p
        self.miss = miss
        self.l2 = Server(p.per_cycle(p.l2_bandwidth) * share)
        self.hbm = Server(p.per_cycle(p.hbm_bandwidth) * share)
        self.sms = [Sm(n, engine, p, observed.get(n)) for n in range(sms)]
        self.flops = 0.0

    def fetch(self, at: float, nbytes: float) -> float:
        """When bytes asked for at ``at`` have all come from L2 and HBM."""
        _, end = self.l2.serve(at, nbytes)
        latency = self.p.l2_latency
        if self.miss:
            _, far = self.hbm.serve(at, nbytes * self.miss)
            end = max(end, far)
            latency += self.miss * self.p.hbm_latency
        return end + latency

    def write(self, at: float, nbytes: float) -> float:
        """When bytes sent at ``at`` have been taken; what is written goes on to HBM."""
        _, end = self.l2.serve(at, nbytes)
        _, far = self.hbm.serve(at, nbytes)
        return max(end, far)
