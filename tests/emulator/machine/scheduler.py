"""Scheduling of clusters, of warps, and of the completion of asynchronous work."""

from typing import TYPE_CHECKING

from tests.emulator.findings import Deadlock, EmulatorError, Livelock
from tests.emulator.machine.cta import Cluster
from tests.emulator.machine.schedule import Schedule
from tests.emulator.machine.shortage import shortages
from tests.emulator.machine.sm import Places
from tests.emulator.machine.warp import Warp

if TYPE_CHECKING:
    from tests.emulator.machine.chain import Chain

# Polling turns, per resident warp, after which a run counts as a livelock.
_POLLS = 2000
# Polling turns after which an in-order cluster yields to the clusters that it may be polling for.
_PATIENCE = 50


class Scheduler:
    """Scheduler of the clusters of a chain of launches; only clusters that fit are resident.

    In order: a cluster runs until it ends, waits for another cluster, or has only polled for a
    while; only then does the next cluster start. Where CTAs share SMs, every cluster that fits has
    started, and a cluster yields after it has allocated tensor memory, relinquished the allocation
    permit or released dependents. At random: all resident clusters take turns.

    Args:
        chain: launches in order.
        places: SMs for the clusters.
        schedule: schedule of the run.
    """

    def __init__(self, chain: "Chain", places: Places, schedule: Schedule) -> None:
        self.chain = chain
        self.launches = chain.launches
        self.clusters: list[Cluster] = []
        self.polls = 0
        self._places = places
        self._schedule = schedule
        self._timed_out = False
        self._random = schedule.random()
        self._mixed = schedule.warps == "random"
        self._eager = self._mixed or chain.shared  # whether clusters start as soon as they fit
        self._gave_way = False

    def resume(self, warp: Warp) -> None:
        self.polls = 0
        self._timed_out = False
        warp.cta.cluster.ready.append(warp)

    def give_way(self) -> bool:
        """Whether a warp that has just unblocked other warps should yield to them."""
        self._gave_way = self.chain.shared
        return self._gave_way

    def run(self) -> None:
        """Run all grids.

        Raises:
            Deadlock, Livelock: no warp can proceed, or none makes progress.
        """
        while True:
            if self._eager:
                while self._start():
                    pass
            movable = [c for c in self.clusters if c.ready or not c.units.idle]
            if not movable:
                if sum(cluster.start_late() for cluster in self.clusters):
                    continue
                if self._start():
                    continue
                if not self.clusters:
                    return
                if self._time_out():
                    continue
                self._stuck(Deadlock, "no warp can go on and nothing is in flight")
            cluster = self._random.choice(movable) if self._mixed else self._first(movable)
            self._turn(cluster)
            if not self._mixed and cluster.ready:
                cluster.start_late()
                self.clusters.remove(cluster)
                self.clusters.append(cluster)
                self._start()
            if not cluster.alive:
                while not cluster.units.idle:
                    cluster.units.step()
                self.clusters.remove(cluster)
                self._end(cluster)

    def _first(self, movable: list[Cluster]) -> Cluster:
        """Next cluster to run, from the launch that the schedule prefers unless all warps poll."""
        if len(self.launches) == 1 or self.polls >= _PATIENCE:
            return movable[0]
        chosen = max if self._schedule.successor_first else min
        return chosen(movable, key=lambda cluster: cluster.launch.link.number)

    def _time_out(self) -> bool:
        """End all waits that have a time limit; returns whether there were any.

        Does nothing if no warp has made progress since the last time.
        """
        if self._timed_out:
            return False
        self._timed_out = True
        limited = [
            warp
            for cluster in self.clusters
            for cta in cluster.ctas
            for warp in cta.warps
            if warp.limited
        ]
        for warp in limited:
            warp.time_out()
        return bool(limited)

    def _start(self) -> bool:
        link = self.chain.next_link()
        if link is None:
            return False
        launch = link.launch
        sms = self._places.take(launch.cluster_size, launch.needs)
        if sms is None:
            return False
        if not launch.has_started:
            link.start()
        number = launch.next_cluster()
        assert number is not None
        for sm in sms:
            launch.counters.neighbours += sm.start(link.number)
        self.clusters.append(Cluster(launch, number, sms))
        return True

    def _end(self, cluster: Cluster) -> None:
        link = cluster.launch.link
        self._places.give(cluster.sms, cluster.launch.needs)
        for sm in cluster.sms:
            sm.launches[link.number] -= 1
        link.cluster_ended()

    def _turn(self, cluster: Cluster) -> None:
        units = cluster.units
        self._gave_way = False
        if not self._mixed:
            # Run one cluster until none of its warps can proceed alone.
            warps = sum(len(cta.warps) for cta in cluster.ctas)
            while True:
                patience = self.polls + _PATIENCE * warps
                while cluster.ready and self.polls < patience:
                    self._run(cluster, cluster.ready.pop(0))
                    if self._gave_way:
                        return
                if units.idle:
                    return
                units.step()
                self._timed_out = False
        alone = cluster.ready == [cluster.starved] and not units.idle
        if cluster.ready and not alone and not units.may_step():
            self._run(cluster, self._pick(cluster))
        elif not units.idle:
            units.step()
            self._timed_out = False

    def _pick(self, cluster: Cluster) -> Warp:
        """Random ready warp; the starved warp only if no other is ready, or if all warps poll."""
        ready = cluster.ready
        index = self._random.randrange(len(ready))
        if ready[index] is cluster.starved and len(ready) > 1 and self.polls < _PATIENCE:
            index -= 1
        return ready.pop(index)

    def _run(self, cluster: Cluster, warp: Warp) -> None:
        if not warp.run():
            warp.exited = True
            warp.launch.counters.add_blocks(warp.index, warp.blocks_run)
            self.polls = 0
            self._timed_out = False
            warp.cta.warp_exited(warp)
        elif warp.ready:
            cluster.ready.append(warp)
            if self._mixed or len(cluster.ready) >= 1:
                self._count_poll()

    def _count_poll(self) -> None:
        self.polls += 1
        warps = sum(len(cta.warps) for c in self.clusters for cta in c.ctas)
        if self.polls > _POLLS * warps:
            self._stuck(Livelock, f"warps have only polled for {self.polls} turns")

    def _stuck(self, kind: type[EmulatorError], fact: str) -> None:
        lines = [line for cluster in self.clusters for line in cluster.state()]
        shown = lines[:60] + ([f"... and {len(lines) - 60} more"] if len(lines) > 60 else [])
        raise kind("\n  ".join([fact, *shortages(self.clusters), *shown]))
