"""Model of a traced launch: residency, waves, and the choice of clusters to simulate."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from heapq import heapreplace
from typing import TYPE_CHECKING

from tests.emulator.machine.trace import Event
from tests.emulator.timing.chip import Chip
from tests.emulator.timing.engine import Engine
from tests.emulator.timing.grid import Grid
from tests.emulator.timing.parameters import B200_TIMING, Parameters
from tests.emulator.timing.prepared import Cluster, Prepared
from tests.emulator.timing.replay import WarpReplay
from tests.emulator.timing.result import Simulated, Timing, WarpTime
from tests.emulator.timing.roles import role_of, wait_name
from tests.emulator.timing.stream import Stream
from tests.emulator.timing.supply import Supply, events_of
from tests.emulator.timing.timeline import Timeline

if TYPE_CHECKING:
    from tests.emulator.machine.launch import Launch

_BUDGET = 200_000  # trace items up to which every cluster is simulated
_MOST_CLASSES = 12
_WAVES = 5  # simulated waves of a grid with many more


def model(
    launch: "Launch",
    parameters: Parameters = B200_TIMING,
    *,
    clusters: int | None = None,
    footprint: float | None = None,
    exact: bool | None = None,
    registers: int = 0,
    repeats: Sequence[int] = (),
) -> Timing:
    """Model the time of a finished launch.

    Args:
        launch: launch from ``Gpu.launch(..., traced=True)``.
        parameters: parameters of the chip.
        clusters: number of clusters of the grid; the traced clusters repeat to fill the grid.
        footprint: bytes that come from HBM because nothing has read them before; by default the
            distinct bytes read by the traced clusters, for each repetition.
        exact: whether to simulate every cluster; by default where that is cheap.
        registers: registers per thread, as ptxas reports (-v), which limit the CTAs per SM; 0 for
            unknown.
        repeats: see ``Prepared``.

    Raises:
        TimingError: the launch was not traced, or its trace ends in a deadlock.
    """
    prepared = Prepared(launch, parameters, clusters, registers, repeats)
    return Model(prepared, parameters, footprint).run(exact)


class Model:
    """Model of one launch's time."""

    def __init__(self, prepared: Prepared, parameters: Parameters, footprint: float | None) -> None:
        self._prepared = prepared
        self._traced = prepared.traced
        self._p = parameters
        self._clusters = prepared.clusters
        self._size = prepared.size
        self._places = prepared.places
        self._deep = prepared.deep
        self._supply = Supply(
            prepared.ctas, prepared.repeat, prepared.script.cached, missing=footprint
        )
        self._notes = list(self._shortcomings())

    def _shortcomings(self) -> Iterator[str]:
        """Descriptions of the launch's actions that the model cannot follow."""
        if any(e.kind == "launch_control" for cta in self._prepared.ctas for e in events_of(cta)):
            yield "clusterlaunchcontrol gave out work in the order of the functional run"
        if self._supply.hbm > self._p.l2_bytes:
            yield "what comes from HBM exceeds L2: reads that miss it again are not counted"

    def run(self, exact: bool | None) -> Timing:
        """Simulate the chosen clusters, and compute the grid's time."""
        resident = self._prepared.resident
        total = sum(len(w) for cluster in self._traced for cta in cluster for w in cta.warps)
        cost = total / len(self._traced)
        if exact is None:
            exact = cost * self._clusters <= _BUDGET
        if exact:
            clusters = self._prepared.repeated(self._clusters)
            first = self._simulate(clusters, self._p.gpc_sizes(), 1.0)
            cycles, busy = first.cycles, first.busy
        else:
            first, cycles, busy = self._sample(cost) or self._represent()
        p = self._p
        flops = busy.pop("FLOP")
        shares = {
            "L2": busy.pop("L2") / (cycles * p.per_cycle(p.l2_bandwidth)),
            "HBM": busy.pop("HBM") / (cycles * p.per_cycle(p.hbm_bandwidth)),
        }
        return Timing(
            kernel=self._prepared.launch.program.kernel.name,
            parameters=p,
            cycles=cycles,
            launch_us=p.launch_overhead,
            clusters=self._clusters,
            waves=math.ceil(self._clusters / resident),
            resident=min(resident, self._clusters),
            exact=exact,
            busy={unit: value / (p.sms * cycles) for unit, value in busy.items()} | shares,
            flops=flops,
            read_bytes=self._supply.reads,
            hbm_bytes=self._supply.hbm,
            warps=first.warps,
            timeline=first.timeline,
            notes=self._notes,
        )

    def _represent(self) -> tuple[Simulated, float, dict[str, float]]:
        """Simulate one cluster of each class, and list-schedule all clusters with these times."""
        classes: dict[int, list[int]] = {}
        for number, cluster in enumerate(self._traced):
            classes.setdefault(_signature(cluster), []).append(number)
        groups = sorted(classes.values(), key=len, reverse=True)
        if len(groups) > _MOST_CLASSES:
            groups = _by_length(self._traced)
        self._notes.append(
            f"{len(groups)} clusters simulated for the {len(classes)} different ones of "
            f"{len(self._traced)} traced; the grid has {self._clusters}"
        )
        used = min(self._places, self._clusters)
        beside = min(self._deep, math.ceil(self._clusters / self._places))
        times: dict[int, float] = {}
        busy: defaultdict[str, float] = defaultdict(float)
        first: Simulated | None = None
        for members in groups:
            found = self._simulate([self._traced[members[0]]] * beside, (self._size,), 1 / used)
            first = first or found
            times.update(dict.fromkeys(members, found.cycles))
            weight = len(members) / len(self._traced) * self._clusters / beside
            for unit, value in found.busy.items():
                busy[unit] += value * weight
        assert first is not None
        order = [times[number % len(self._traced)] for number in range(self._clusters)]
        cycles = list_schedule(order, self._prepared.resident, self._p.cta_launch)
        return first, cycles, dict(busy)

    def _sample(self, cost: float) -> tuple[Simulated, float, dict[str, float]] | None:
        """Simulate some waves of the whole chip, and extrapolate; None if too expensive.

        Args:
            cost: trace items of a cluster, on average.
        """
        resident = self._prepared.resident
        spare = self._clusters // resident
        waves = min(_WAVES, spare, int(_BUDGET / (cost * resident)))
        if waves < 3:
            return None
        step = (waves - 1) // 2 * resident
        many = (waves - 1) * resident + self._clusters % resident
        few = many - step
        one, two = (
            self._simulate(self._prepared.repeated(n), self._p.gpc_sizes(), 1.0)
            for n in (few, many)
        )
        more = (self._clusters - many) / step
        self._notes.append(f"{many} clusters simulated of the {self._clusters} of the grid")
        busy = {unit: value + more * (value - one.busy[unit]) for unit, value in two.busy.items()}
        return two, two.cycles + more * (two.cycles - one.cycles), busy

    def _simulate(self, clusters: list[Cluster], gpcs: tuple[int, ...], share: float) -> Simulated:
        """Simulate clusters in order on GPCs of the given sizes with ``share`` of the bandwidth."""
        engine, timeline = Engine(), Timeline("SM 0")
        chip = Chip(engine, self._p, gpcs, share, {0: timeline})
        grid = Grid(chip, self._prepared, self._supply, clusters)
        stream = Stream(chip, [grid])
        stream.run()
        busy: defaultdict[str, float] = defaultdict(float)
        for sm in chip.sms:
            for unit, cycles in sm.busy().items():
                busy[unit] += cycles
        busy.update({"L2": chip.l2.work, "HBM": chip.hbm.work, "FLOP": chip.flops})
        warps = [self._warp_time(warp) for warp in stream.replays[0].warps]
        return Simulated(grid.ended, busy, warps, timeline)

    def _warp_time(self, warp: WarpReplay) -> WarpTime:
        program = self._prepared.launch.program
        waiting: defaultdict[str, float] = defaultdict(float)
        for (kind, line), cycles in warp.waits.items():
            waiting[wait_name(program, kind, line)] += cycles
        return WarpTime(
            name=warp.name,
            role=role_of(program, warp.trace),
            total=(warp.ended or 0.0) - (warp.started or 0.0),
            running=warp.running,
            contended=warp.running - warp.alone,
            waiting=dict(sorted(waiting.items(), key=lambda item: -item[1])),
        )


def list_schedule(times: list[float], slots: int, between: float) -> float:
    """Cycle at which the last job ends.

    Jobs take ``times`` and start in order, each in the first free slot, ``between`` cycles after
    the slot's preceding job.
    """
    free = [-between] * slots
    for time in times:
        heapreplace(free, free[0] + between + time)
    return max(free)


def _signature(cluster: Cluster) -> int:
    """Hash of a cluster's work, independent of the names of barriers."""
    return hash(
        tuple(
            tuple(item if isinstance(item, int) else _shape(item) for item in trace)
            for cta in cluster
            for trace in cta.warps
        )
    )


def _shape(event: Event) -> tuple[object, ...]:
    detail = event.detail
    if event.kind in ("copy", "commit"):
        assert isinstance(detail, tuple)
        detail = (detail[0], len(detail[1])) if event.kind == "copy" else len(detail)
    return (event.kind, event.line, event.amount, detail)


def _by_length(clusters: list[Cluster]) -> list[list[int]]:
    """Clusters grouped by similar trace length, a typical cluster of each group first."""
    lengths = [sum(len(w) for cta in cluster for w in cta.warps) for cluster in clusters]
    order = sorted(range(len(clusters)), key=lengths.__getitem__)
    step = math.ceil(len(order) / _MOST_CLASSES)
    groups = [order[at : at + step] for at in range(0, len(order), step)]
    for group in groups:
        group.insert(0, group.pop(len(group) // 2))
    return groups
