"""Model of a traced launch: residency, waves, and which clusters to simulate."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from heapq import heapreplace
from typing import TYPE_CHECKING

from tests.emulator.machine.trace import CtaTrace, Event
from tests.emulator.timing.barriers import expected_arrivals, participants
from tests.emulator.timing.caches import distinct_bytes, l2_reads
from tests.emulator.timing.chip import Chip, Hits
from tests.emulator.timing.costs import Costs
from tests.emulator.timing.engine import Engine
from tests.emulator.timing.errors import TimingError
from tests.emulator.timing.parameters import B200_TIMING, Parameters
from tests.emulator.timing.replay import ClusterReplay, Script, WarpReplay
from tests.emulator.timing.result import Simulated, Timing, WarpTime
from tests.emulator.timing.roles import role_of, wait_name
from tests.emulator.timing.segments import segments_of
from tests.emulator.timing.timeline import Timeline

if TYPE_CHECKING:
    from tests.emulator.machine.launch import Launch

Cluster = list[CtaTrace]
# Loads with these pass L1 by.
_UNCACHED = frozenset(
    (
        *("cg", "cs", "cv", "lu", "L1::no_allocate", "volatile", "mmio"),
        *("relaxed", "acquire"),
    )
)
_READS = ("copy", "async_copy", "read", "atomic")
_BUDGET = 200_000  # trace items that are simulated without asking which are alike
_MOST_CLASSES = 12
_WAVES = 5  # to simulate of a grid of many more


def model(
    launch: "Launch",
    parameters: Parameters = B200_TIMING,
    *,
    clusters: int | None = None,
    footprint: float | None = None,
    exact: bool | None = None,
    registers: int = 0,
) -> Timing:
    """Models the time of a finished launch.

    Args:
        launch: of ``Gpu.launch(..., traced=True)``.
        parameters: of the chip.
        clusters: how many the grid has; more than were run repeat those that were.
        footprint: bytes that come from HBM because nothing has read them before; by default the
            distinct ones that the clusters that were run read, for each repetition of them.
        exact: whether to simulate every cluster; by default where that is cheap.
        registers: of a thread, as ptxas says (-v): they limit the CTAs of an SM; 0 for unknown.

    Raises:
        TimingError: the launch was not traced, or its trace ends in a deadlock.
    """
    if launch.traces is None:
        raise TimingError("launch: has no trace, run it with traced=True")
    found: defaultdict[int, Cluster] = defaultdict(list)
    for trace in launch.traces:
        found[trace.cluster].append(trace)
    traced = [sorted(cluster, key=lambda cta: cta.rank) for _, cluster in sorted(found.items())]
    if not traced:
        raise TimingError("launch: its trace has no CTA")
    count = clusters or len(traced)
    return Model(launch, traced, parameters, count, footprint, registers).run(exact)


class Model:
    """One launch being modelled."""

    def __init__(
        self,
        launch: "Launch",
        traced: list[Cluster],
        parameters: Parameters,
        clusters: int,
        footprint: float | None,
        registers: int,
    ) -> None:
        self._launch = launch
        self._traced = traced
        self._p = parameters
        self._clusters = clusters
        size = len(traced[0])
        self._size = size
        self._places = max(1, int(parameters.sms) // size)  # groups of SMs that hold a cluster
        self._deep = self._ctas_per_sm(registers)
        self._l1 = max(0.0, parameters.l1_bytes - self._deep * (launch.shared_bytes + 1024))
        self._script = self._read_script()
        self._hits = self._find_hits(footprint)
        self._notes = list(self._shortcomings())

    def _events(self, cta: CtaTrace) -> Iterator[Event]:
        return (item for trace in cta.warps for item in trace if isinstance(item, Event))

    def _find_hits(self, footprint: float | None) -> Hits:
        """Shares the bytes from HBM out to prefetches and to the loads that come after them."""
        ctas = [cta for cluster in self._traced for cta in cluster]
        repeat = self._clusters / len(self._traced)
        fetched = [e for cta in ctas for e in self._events(cta) if e.kind == "prefetch"]
        prefetched = repeat * sum(event.amount for event in fetched)
        cached = self._script.cached
        reads = repeat * sum(l2_reads(self._events(cta), cached) for cta in ctas)
        early = distinct_bytes(event.where for event in fetched)
        read = [e.where for cta in ctas for e in self._events(cta) if e.kind in _READS]
        distinct = distinct_bytes([*read, *(event.where for event in fetched)])
        asked = reads + prefetched
        if footprint is None:
            footprint = distinct * max(1.0, repeat)
        self._reads = reads
        self._hbm = min(footprint, asked)
        by_prefetch = min(prefetched, self._hbm * early / distinct if distinct else 0.0)
        by_load = min(reads, self._hbm - by_prefetch)
        return Hits(
            by_load / reads if reads else 0.0,
            min(1.0, prefetched / reads) if reads else 0.0,
            by_prefetch / prefetched if prefetched else 0.0,
        )

    def _shortcomings(self) -> Iterator[str]:
        """Actions of this launch that the model cannot follow."""
        ctas = [cta for cluster in self._traced for cta in cluster]
        if any(e.kind == "launch_control" for cta in ctas for e in self._events(cta)):
            yield "clusterlaunchcontrol gave out work in the order of the functional run"
        if self._hbm > self._p.l2_bytes:
            yield "what comes from HBM exceeds L2: reads that miss it again are not counted"

    def _ctas_per_sm(self, registers: int) -> int:
        p, launch = self._p, self._launch
        threads = -(-launch.threads // 32) * 32
        by_shared = p.shared_per_sm // (launch.shared_bytes + 1024)
        by_registers = p.registers_per_sm // (max(1, -(-registers // 8) * 8) * threads)
        limits = (by_shared, p.threads_per_sm // threads, by_registers, p.ctas_per_sm)
        return int(max(1, min(limits)))

    def _read_script(self) -> Script:
        program = self._launch.program
        ctas = [cta for cluster in self._traced for cta in cluster]
        body = program.kernel.body
        return Script(
            program,
            segments_of(program.flow, Costs(self._p)),
            expected_arrivals(ctas),
            participants(ctas),
            {
                item.key: cta.position
                for cta in ctas
                for trace in cta.warps
                for item in trace
                if isinstance(item, Event) and item.kind == "wait"
            },
            frozenset(i.line for i in body if i.parts[:2] == ("mbarrier", "test_wait")),
            frozenset(
                i.line
                for i in body
                if i.parts[:3] == ("barrier", "cluster", "arrive") and not i.has("relaxed")
            ),
            frozenset(i.line for i in body if i.parts[0] == "ld" and not _UNCACHED & {*i.parts}),
        )

    def run(self, exact: bool | None) -> Timing:
        """Simulates what is needed, and puts the grid's time together."""
        resident = self._places * self._deep
        total = sum(len(w) for cluster in self._traced for cta in cluster for w in cta.warps)
        cost = total / len(self._traced)
        if exact is None:
            exact = cost * self._clusters <= _BUDGET
        if exact:
            used = min(self._places, self._clusters)
            first = self._simulate(self._repeated(self._clusters), used, 1.0)
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
            kernel=self._launch.program.kernel.name,
            parameters=p,
            cycles=cycles,
            launch_us=p.launch_overhead,
            clusters=self._clusters,
            waves=math.ceil(self._clusters / resident),
            resident=min(resident, self._clusters),
            exact=exact,
            busy={unit: value / (p.sms * cycles) for unit, value in busy.items()} | shares,
            flops=flops,
            read_bytes=self._reads,
            hbm_bytes=self._hbm,
            warps=first.warps,
            timeline=first.timeline,
            notes=self._notes,
        )

    def _represent(self) -> tuple[Simulated, float, dict[str, float]]:
        """Simulates one cluster of each class, and list-schedules all clusters with their times."""
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
            found = self._simulate([self._traced[members[0]]] * beside, 1, 1 / used)
            first = first or found
            times.update(dict.fromkeys(members, found.cycles))
            weight = len(members) / len(self._traced) * self._clusters / beside
            for unit, value in found.busy.items():
                busy[unit] += value * weight
        assert first is not None
        order = [times[number % len(self._traced)] for number in range(self._clusters)]
        cycles = list_schedule(order, self._places * self._deep, self._p.cta_launch)
        return first, cycles, dict(busy)

    def _sample(self, cost: float) -> tuple[Simulated, float, dict[str, float]] | None:
        """Simulates some waves of the whole chip, and lets the last ones go on; None if too much.

        Args:
            cost: trace items of a cluster, on average.
        """
        resident = self._places * self._deep
        spare = self._clusters // resident
        waves = min(_WAVES, spare, int(_BUDGET / (cost * resident)))
        if waves < 3:
            return None
        step = (waves - 1) // 2 * resident
        many = (waves - 1) * resident + self._clusters % resident
        few = many - step
        one, two = (self._simulate(self._repeated(n), self._places, 1.0) for n in (few, many))
        more = (self._clusters - many) / step
        self._notes.append(f"{many} clusters simulated of the {self._clusters} of the grid")
        busy = {unit: value + more * (value - one.busy[unit]) for unit, value in two.busy.items()}
        return two, two.cycles + more * (two.cycles - one.cycles), busy

    def _repeated(self, count: int) -> list[Cluster]:
        traced = self._traced
        return [traced[number % len(traced)] for number in range(count)]

    def _simulate(self, clusters: list[Cluster], places: int, share: float) -> Simulated:
        """Runs clusters in order on ``places`` groups of SMs with ``share`` of the bandwidth."""
        engine, timeline = Engine(), Timeline("SM 0")
        chip = Chip(
            engine, self._p, places * self._size, share, self._hits, self._l1, {0: timeline}
        )
        waiting = list(enumerate(clusters))[::-1]
        replays: list[ClusterReplay] = []
        repetitions: Counter[int] = Counter()
        running = 0

        def fill(place: int, delay: float) -> None:
            nonlocal running
            if not waiting:
                return
            number, cluster = waiting.pop()
            sms = chip.sms[place * self._size : (place + 1) * self._size]
            label = f"cluster {number} " if len(clusters) > places else ""

            def done() -> None:
                nonlocal running
                running -= 1
                fill(place, self._p.cta_launch)

            running += 1
            repetition = repetitions[id(cluster)]
            repetitions[id(cluster)] += 1
            replays.append(ClusterReplay(chip, self._script, cluster, sms, done, label, repetition))
            engine.at(engine.now + delay, replays[-1].start)

        for place in list(range(places)) * self._deep:
            fill(place, 0.0)
        engine.run()
        if running or waiting:
            stuck = [warp.stuck for replay in replays for warp in replay.warps if warp.stuck]
            raise TimingError("\n  ".join(["trace: its replay ends in a deadlock", *stuck[:20]]))
        busy: defaultdict[str, float] = defaultdict(float)
        for sm in chip.sms:
            for unit, cycles in sm.busy().items():
                busy[unit] += cycles
        busy.update({"L2": chip.l2.work, "HBM": chip.hbm.work, "FLOP": chip.flops})
        warps = [self._warp_time(warp) for warp in replays[0].warps]
        return Simulated(engine.now, busy, warps, timeline)

    def _warp_time(self, warp: WarpReplay) -> WarpTime:
        program = self._launch.program
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
    """Cycle when the last of ``times`` ends; they start in order, each in the first free slot."""
    free = [-between] * slots
    for time in times:
        heapreplace(free, free[0] + between + time)
    return max(free)


def _signature(cluster: Cluster) -> int:
    """Equal for clusters that do the same, whatever their barriers are called."""
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
    """Clusters of similar trace length together, a typical one first."""
    lengths = [sum(len(w) for cta in cluster for w in cta.warps) for cluster in clusters]
    order = sorted(range(len(clusters)), key=lengths.__getitem__)
    step = math.ceil(len(order) / _MOST_CLASSES)
    groups = [order[at : at + step] for at in range(0, len(order), step)]
    for group in groups:
        group.insert(0, group.pop(len(group) // 2))
    return groups
