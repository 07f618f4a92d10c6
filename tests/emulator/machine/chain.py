"""Sequence of launches, each of which may overlap its predecessor.

A dependent launch (programmatic stream serialization) may start once every CTA of its predecessor
has executed griddepcontrol.launch_dependents or has exited; any other launch starts once all
earlier launches have ended. ``memory.history`` tells which accesses of earlier launches a launch is
ordered after.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tests.emulator.findings import EmulatorError, UnwaitedLoad
from tests.emulator.machine.scheduler import Scheduler
from tests.emulator.machine.sm import Apart, Places, Sharing, shared_floor
from tests.emulator.memory.clocks import Events
from tests.emulator.memory.history import Grid

if TYPE_CHECKING:
    from tests.emulator.machine.cta import Cta
    from tests.emulator.machine.launch import Launch


class Link:
    """Position of one launch in the chain.

    Args:
        launch: the launch.
        before: the preceding launch, None for the first.

    Attributes:
        number: index in the chain.
        order: record of the launch for later launches, see ``memory.history``.
        done: whether all clusters have ended and their writes are visible.
        waiters: warps of the next launch that wait for ``done``.
    """

    def __init__(self, launch: "Launch", before: "Link | None") -> None:
        self.launch = launch
        self.before = before
        self.number: int = before.number + 1 if before else 0
        self.dependent = bool(launch.attributes.get("programmatic_stream_serialization"))
        self.order = Grid(launch.program.kernel.name)
        self.done = False
        self.waiters: list[Callable[[], None]] = []
        self._clusters_left = launch.clusters
        self._holding = launch.clusters * launch.cluster_size  # CTAs that block the next launch

    @property
    def earlier(self) -> "list[Link]":
        """The preceding launches, the nearest first."""
        return [] if self.before is None else [self.before, *self.before.earlier]

    @property
    def may_start(self) -> bool:
        if self.before is None or not self.dependent:
            return all(link.done for link in self.earlier)
        return not self.before._holding

    def start(self) -> None:
        """Note the earlier launches that precede the launch's first instruction."""
        if self.before is None:
            return
        if self.dependent:
            self.order.running = self.before.order.running_after()
        for link in self.earlier:
            if link.order not in self.order.running:
                self.launch.known.append(link.launch.events.done)

    def learn(self) -> list[int]:
        """Vector-clock components of the launches that griddepcontrol.wait waits for.

        Called once the preceding launch has ended.
        """
        if self.before is None or not self.dependent:
            return []
        self.order.running = running = self.before.order.running_after()
        return [
            link.launch.events.done for link in self.earlier if running.get(link.order, "") == ""
        ]

    def release(self, cta: "Cta") -> bool:
        """Count a CTA's release of dependents; returns whether the warp should yield."""
        if cta.released:
            return False
        cta.released = True
        self._holding -= 1
        return self.launch.scheduler.give_way()

    def cancelled(self) -> None:
        """Count a cluster that never starts, as clusterlaunchcontrol gave its work to another."""
        self._holding -= self.launch.cluster_size
        self._end_cluster()

    def cluster_ended(self) -> None:
        self._end_cluster()

    def _end_cluster(self) -> None:
        self._clusters_left -= 1
        if not self._clusters_left:
            self.done = True
            self.launch.events.finish()
            for wake in self.waiters:
                wake()


class Chain:
    """Launches of one stream that overlap as far as their attributes allow.

    Args:
        launches: launches in stream order, one or more, none of which has run.
        sharing: policy of SM sharing; None gives each CTA an exclusive SM.

    Raises:
        LaunchError: a cluster is larger than a GPC.
    """

    def __init__(self, launches: Sequence["Launch"], sharing: Sharing | None) -> None:
        self.launches = launches
        first = launches[0]
        self.gpu = first.gpu
        self.shared = sharing is not None
        self.links: list[Link] = []
        for launch in launches:
            launch.link = Link(launch, self.links[-1] if self.links else None)
            self.links.append(launch.link)
        places: Places
        if sharing is None:
            places = Apart(self.gpu.limits, first.resident_clusters)
        else:
            places = shared_floor(
                self.gpu.limits, sharing, max(launch.cluster_size for launch in launches)
            )
        scheduler = Scheduler(self, places, first.schedule)
        for launch in launches:
            launch.scheduler = scheduler

    def next_link(self) -> Link | None:
        """The next launch whose clusters may start, or None."""
        for link in self.links:
            if link.launch.has_next:
                return link if link.may_start else None
        return None

    def run(self) -> None:
        """Run all launches to completion.

        Raises:
            EmulatorError: a finding.
        """
        history, first = self.gpu.history, self.launches[0]
        for launch in self.launches:
            for lint in launch.program.lints:
                launch.report(UnwaitedLoad(lint.fact, launch.program.where(lint.line)))
        alone = len(self.links) == 1
        # The first launch of several is ordered after all earlier launches.
        order, events = history.begin(
            first.program.kernel.name, first.stream, alone and self.links[0].dependent
        )
        self.links[0].order = order
        self.gpu.memory.regrain(min(launch.program.granule for launch in self.launches))
        events.strict_scopes = first.gpu.strict_scopes
        parts = [events] if alone else events.split(len(self.launches))
        for launch, part in zip(self.launches, parts, strict=True):
            launch.events = part
        try:
            with np.errstate(all="ignore"):
                self.launches[0].scheduler.run()
        except EmulatorError:
            history.forget()
            raise
        read, written = history.end(first.stream, order, events)
        if alone:
            first.counters.nbytes["HBM read, each byte once"] = read
            first.counters.nbytes["HBM write, each byte once"] = written
        else:  # later launches are ordered after all of the chain
            history.synchronise(first.stream)
        for launch in self.launches:
            # A finished launch is kept for its counters; a large grid leaves millions of events.
            launch.events = Events()
            launch.published = {}
            launch.pollers = {}
