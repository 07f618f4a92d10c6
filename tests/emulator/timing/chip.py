"""Units of an SM and of the whole chip, modelled as servers."""

import math
from collections import defaultdict
from random import Random

from tests.emulator.machine.residency import Room
from tests.emulator.timing.barriers import Columns
from tests.emulator.timing.engine import Engine, Server
from tests.emulator.timing.issue import Scheduler
from tests.emulator.timing.parameters import Parameters
from tests.emulator.timing.timeline import Timeline

QUARTERS = 4  # of tensor memory's lanes; a warp reaches the quarter of its index modulo 4


class Sm:
    """One streaming multiprocessor. Most attributes are servers; the unit of their work is stated.

    Attributes:
        number: index among the simulated SMs.
        schedulers: warp schedulers.
        tensor: MMA pipe, in cycles; ``tensor_copies`` executes tcgen05.cp.
        tma: copy engine, in rows of 128 bytes.
        fills, stores: paths from L2 (loads and cp.async) and to L2, in bytes.
        peers: path to the shared memory of other CTAs of the cluster, in bytes.
        shared: port of loads and stores to shared memory and L1, in passes of 128 bytes.
        gpc: GPC of the SM.
        room: shared memory, threads and registers left for CTAs.
        columns: allocator of tensor memory columns.
        warpgroup: each scheduler's part of the tensor core for wgmma, in cycles.
        reads, writes: tensor memory's ports, one for each quarter of the lanes, in registers.
        shared_bytes: bytes moved in or out of shared memory by any unit.
        timeline: recorded timeline of the SM, or None.
    """

    def __init__(
        self, number: int, gpc: int, engine: Engine, p: Parameters, timeline: Timeline | None
    ) -> None:
        self.number = number
        self.gpc = gpc
        self.room = Room(p.limits)
        self.schedulers = [Scheduler(engine) for _ in range(int(p.schedulers))]
        self.tensor = Server()
        self.tensor_copies = Server(p.tensor_copy_bandwidth)
        self.tma = Server(1 / p.tma_row_interval)
        self.fills = Server(p.fill_bandwidth)
        self.stores = Server(p.store_bandwidth)
        self.peers = Server(p.peer_store_bandwidth)
        self.shared = Server()
        self.columns = Columns(int(p.tensor_columns))
        self.warpgroup = [Server() for _ in self.schedulers]
        self.reads = [Server(1 / p.tensor_read_interval) for _ in range(QUARTERS)]
        self.writes = [Server(1 / p.tensor_write_interval) for _ in range(QUARTERS)]
        self.shared_bytes = 0.0
        self.timeline = timeline
        self._shared_bandwidth = p.shared_bandwidth

    def busy(self) -> dict[str, float]:
        """Cycles of work by unit, averaged over units of the same kind."""
        found: defaultdict[str, float] = defaultdict(float)
        for scheduler in self.schedulers:
            for pipe, cycles in scheduler.used.items():
                found[pipe] += cycles / len(self.schedulers)
        parts = sum(server.busy for server in self.warpgroup) / len(self.warpgroup)
        found["tensor core"] = self.tensor.busy + parts
        found["tensor memory copy"] = self.tensor_copies.busy
        found["tensor memory read"] = sum(s.busy for s in self.reads) / QUARTERS
        found["tensor memory write"] = sum(s.busy for s in self.writes) / QUARTERS
        found["TMA"] = self.tma.busy
        found["L2 to L1"] = self.fills.busy
        found["stores to L2"] = self.stores.busy
        found["stores to peers"] = self.peers.busy
        found["load and store"] = self.shared.busy
        found["shared memory"] = self.shared_bytes / self._shared_bandwidth
        return found


class Banks:
    """HBM banks, which serve the pieces of a request; some banks idle while others have a queue.

    A piece goes to the less busy of two random banks, as if requests were reordered.

    Attributes:
        work: bytes served so far.
    """

    def __init__(self, rate: float, piece: float, time: float) -> None:
        count = max(1, round(rate * time / piece))
        self._banks = [Server(rate / count) for _ in range(count)]
        self._piece, self._time = piece, time
        self._chance = Random(0)
        self.work = 0.0

    def serve(self, at: float, nbytes: float) -> float:
        """Serve bytes requested at ``at``; returns the cycle when all have been served."""
        self.work += nbytes
        pieces = math.ceil(nbytes / self._piece)
        pairs = self._chance.choices(self._banks, k=2 * pieces)
        begun = max(
            (one if one.free < two.free else two).serve(at, nbytes / pieces)[0]
            for one, two in zip(pairs[::2], pairs[1::2], strict=True)
        )
        return begun + self._time


class Chip:
    """Simulated SMs of the chip, with their share of the chip's L2 and HBM.

    Args:
        engine: engine of the simulation.
        p: parameters.
        gpcs: number of SMs to simulate in each GPC.
        share: simulated SMs' part of the bandwidth of L2 and HBM.
        observed: SMs to record, with the timeline of each.

    Attributes:
        l2, hbm: servers of L2 and HBM, in bytes.
        flops: number of operations of the tensor cores.
    """

    def __init__(
        self,
        engine: Engine,
        p: Parameters,
        gpcs: tuple[int, ...],
        share: float,
        observed: dict[int, Timeline],
    ) -> None:
        self.engine = engine
        self.p = p
        self.l2 = Server(p.per_cycle(p.l2_bandwidth) * share)
        bandwidth = p.per_cycle(p.hbm_bandwidth) * share
        self.hbm = Banks(bandwidth, p.hbm_piece, p.hbm_bank_time)
        homes = [gpc for gpc, count in enumerate(gpcs) for _ in range(count)]
        self.sms = [Sm(n, gpc, engine, p, observed.get(n)) for n, gpc in enumerate(homes)]
        self.flops = 0.0
