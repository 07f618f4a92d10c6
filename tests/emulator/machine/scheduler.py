"""Turns: which cluster, which warp, and when asynchronous work completes."""

from typing import TYPE_CHECKING

from tests.emulator.findings import Deadlock, EmulatorError, Livelock
from tests.emulator.machine.cta import Cluster
from tests.emulator.machine.warp import Warp

if TYPE_CHECKING:
    from tests.emulator.machine.launch import Launch

# Turns in which warps only polled before the run is called endless, per resident warp.
_POLLS = 2000
# And before a cluster that runs in order gives way to the others, which it may be polling for.
_PATIENCE = 50


class Scheduler:
    """Runs the clusters of a launch, as many at a time as the chip holds.

    In order: a cluster runs until it ends or waits for another one, or has only polled for a while,
    and only then the next one starts. At random: all resident clusters take turns.
    """

    def __init__(self, launch: "Launch", resident: int) -> None:
        self.launch = launch
        self.resident = resident
        self.clusters: list[Cluster] = []
        self.polls = 0
        self._timed_out = False
        self._random = launch.schedule.random()
        self._mixed = launch.schedule.warps == "random"

    def resume(self, warp: Warp) -> None:
        self.polls = 0
        self._timed_out = False
        warp.cta.cluster.ready.append(warp)

    def run(self) -> None:
        """Runs the whole grid.

        Raises:
            Deadlock, Livelock: nothing can go on, or nothing does.
        """
        while True:
            if self._mixed:
                while len(self.clusters) < self.resident and self._start():
                    pass
            movable = [c for c in self.clusters if c.ready or not c.units.idle]
            if not movable:
                if sum(cluster.start_late() for cluster in self.clusters):
                    continue
                if len(self.clusters) < self.resident and self._start():
                    continue
                if not self.clusters:
                    return
                if self._time_out():
                    continue
                self._stuck(Deadlock, "no warp can go on and nothing is in flight")
            cluster = self._random.choice(movable) if self._mixed else movable[0]
            self._turn(cluster)
            if not self._mixed and cluster.ready:
                cluster.start_late()
                self.clusters.remove(cluster)
                self.clusters.append(cluster)
                if len(self.clusters) < self.resident:
                    self._start()
            if not cluster.alive:
                while not cluster.units.idle:
                    cluster.units.step()
                self.clusters.remove(cluster)

    def _time_out(self) -> bool:
        """Ends all waits that have a time limit, unless that has just been tried in vain."""
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
        number = self.launch.next_cluster()
        if number is None:
            return False
        self.clusters.append(Cluster(self.launch, number))
        return True

    def _turn(self, cluster: Cluster) -> None:
        units = cluster.units
        if not self._mixed:
            # One cluster until it has nothing left to do by itself.
            warps = sum(len(cta.warps) for cta in cluster.ctas)
            while True:
                patience = self.polls + _PATIENCE * warps
                while cluster.ready and self.polls < patience:
                    self._run(cluster, cluster.ready.pop(0))
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
        """A ready warp at random; the one that is starved if there is no other, or all poll."""
        ready = cluster.ready
        index = self._random.randrange(len(ready))
        if ready[index] is cluster.starved and len(ready) > 1 and self.polls < _PATIENCE:
            index -= 1
        return ready.pop(index)

    def _run(self, cluster: Cluster, warp: Warp) -> None:
        if not warp.run():
            warp.exited = True
            self.launch.counters.add_blocks(warp.index, warp.blocks_run)
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
        raise kind("\n  ".join([fact, *shown]))
