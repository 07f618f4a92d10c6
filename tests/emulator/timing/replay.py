"""Replays the traces of one cluster's warps in time."""

from collections import Counter, defaultdict
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from tests.emulator.codegen import Program
from tests.emulator.machine.trace import CtaTrace, Event, Key, WarpTrace
from tests.emulator.timing.barriers import MBarrier, Meeting
from tests.emulator.timing.chip import QUARTERS, Chip, Sm
from tests.emulator.timing.roles import place, wait_name
from tests.emulator.timing.segments import Segment
from tests.emulator.timing.tensor_core import MmaShape, completion, interval, shared_bytes

_ROW = 128  # bytes of a box that the copy engine handles at once
SECTOR = 32
_LOOK_AHEAD = 64
Process = Generator[float | None, None, None]


@dataclass(frozen=True)
class Script:
    """What is the same for all clusters of a launch.

    Attributes:
        program: the kernel.
        segments: of each basic block.
        expected: arrivals of a phase, by mbarrier.
        meetings: warps of each generation of a CTA or cluster barrier.
        owners: position of the CTA that waits on an mbarrier.
        polls: PTX lines of waits that do not block.
        releases: PTX lines of cluster arrivals that order memory.
        names: of PTX lines, for timelines; filled as they are needed.
    """

    program: Program
    segments: list[list[Segment]]
    expected: dict[Key, int]
    meetings: Counter[tuple[str, Key, int]]
    owners: dict[Key, tuple[int, int, int]]
    polls: frozenset[int]
    releases: frozenset[int]
    names: dict[int, str] = field(default_factory=dict)


class ClusterReplay:
    """One cluster on its SMs.

    Args:
        chip: the machine.
        script: of its launch.
        ctas: its traces, by rank.
        sms: the SM of each rank.
        done: called when its last warp has ended.
        label: how timelines call it.
    """

    def __init__(
        self,
        chip: Chip,
        script: Script,
        ctas: list[CtaTrace],
        sms: list[Sm],
        done: Callable[[], None],
        label: str = "",
    ) -> None:
        self.chip = chip
        self.script = script
        self.sms = sms
        self.mbarriers: dict[Key, MBarrier] = {}
        self.meetings: dict[tuple[str, Key, int], Meeting] = {}
        self._done = done
        self._drained = 0.0
        self.warps = [
            WarpReplay(self, cta, index, trace, f"{label}CTA {cta.rank} warp {index}")
            for cta in ctas
            for index, trace in enumerate(cta.warps)
        ]
        self._running = len(self.warps)

    def start(self) -> None:
        for warp in self.warps:
            warp.go()

    def mbarrier(self, key: Key) -> MBarrier:
        found = self.mbarriers.get(key)
        if found is None:
            found = self.mbarriers[key] = MBarrier(self.script.expected.get(key, 1))
        return found

    def meeting(self, kind: str, event: Event) -> Meeting:
        key = (kind, event.key, event.amount)
        found = self.meetings.get(key)
        if found is None:
            found = self.meetings[key] = Meeting(self.script.meetings[key])
        return found

    def drains(self, until: float) -> None:
        """Writes are under way until then; the cluster's SMs are not free before."""
        self._drained = max(self._drained, until)

    def warp_ended(self) -> None:
        self._running -= 1
        if not self._running:
            self.chip.engine.at(self._drained, self._done)


@dataclass
class _Groups:
    """When each bulk group has been read, and written."""

    read: dict[int, float] = field(default_factory=dict)
    written: dict[int, float] = field(default_factory=dict)


class WarpReplay:
    """One warp.

    Attributes:
        name: for timelines.
        started, ended: cycles, or None.
        running: cycles in segments; ``alone`` what they would take without other warps.
        waits: (kind, PTX line) -> cycles.
    """

    def __init__(
        self, cluster: ClusterReplay, cta: CtaTrace, index: int, trace: WarpTrace, name: str
    ) -> None:
        self.cluster = cluster
        self.cta = cta
        self.index = index
        self.name = name
        self.trace = trace
        self.sm = cluster.sms[cta.rank]
        self._chip = cluster.chip
        self._engine = cluster.chip.engine
        self._p = cluster.chip.p
        self._scheduler = self.sm.schedulers[index % len(self.sm.schedulers)]
        self._timeline = self.sm.timeline
        self._process = self._run()
        self._position = 0
        self._loading: tuple[str, ...] = ()
        self._arriving: dict[str, float] = {}  # loads under way, by register
        self._groups = _Groups()
        self._mma_end = 0.0
        self._mma_started = 0.0
        self._mma_issued = 0.0
        self._copied = 0.0  # tcgen05.cp
        self._tensor_loads = 0.0
        self._tensor_stores = 0.0
        self.started: float | None = None
        self.ended: float | None = None
        self.running = 0.0
        self.alone = 0.0
        self.waits: defaultdict[tuple[str, int], float] = defaultdict(float)
        self.stuck: str = ""

    def go(self) -> None:
        """Goes on until the warp sleeps or waits."""
        now = self._engine.now
        if self.started is None:
            self.started = now
        try:
            wake = next(self._process)
        except StopIteration:
            self.ended = self._engine.now
            self.cluster.warp_ended()
            return
        if wake is not None:
            self._engine.at(wake, self.go)

    def _wake_later(self) -> None:
        self._engine.at(self._engine.now + self._p.wake_latency, self.go)

    def _run(self) -> Process:
        trace, blocks = self.trace, self.cluster.script.segments
        count = len(trace)
        last: Segment | None = None
        ended = 0.0
        while self._position < count:
            item = trace[self._position]
            self._position += 1
            if not isinstance(item, int):
                yield from self._event(item)  # an event of no instruction this model knows
                continue
            for segment in blocks[item]:
                yield from self._segment(segment, last, ended)
                last, ended = segment, self._engine.now
                self._loading = segment.loads
                while self._position < count:
                    event = trace[self._position]
                    if isinstance(event, int) or event.line != segment.line:
                        break
                    self._position += 1
                    yield from self._event(event)

    # Instructions

    def _segment(self, segment: Segment, last: Segment | None, ended: float) -> Process:
        engine = self._engine
        if segment.waits and self._arriving:
            until = max((self._arriving.pop(r, 0.0) for r in segment.waits), default=0.0)
            if until > engine.now:
                yield from self._sleep(until, "load", segment.line)
        start = engine.now
        if last is not None:
            until = ended + self._stall(last, segment)
            if until > start:
                self.alone += until - start
                yield until
        if segment.length > 0:
            self._scheduler.start(segment, self.go)
            yield None
            self.alone += segment.length
        self.running += engine.now - start
        if self._timeline is not None:
            self._timeline.add(self.name, self._source(segment), start, engine.now)

    def _source(self, segment: Segment) -> str:
        names = self.cluster.script.names
        if segment.line not in names:
            names[segment.line] = place(self.cluster.script.program, segment.line)
        return names[segment.line]

    def _stall(self, last: Segment, segment: Segment) -> float:
        """Cycles between two segments: results still in a pipe, and the jump between them."""
        stall = 0.0
        for name, late in last.late.items():
            early = segment.early.get(name)
            if early is not None and late - early > stall:
                stall = late - early
        if last.branch and segment.block != last.block + 1:
            stall = max(stall, self._p.branch_latency)
        return stall

    def _sleep(self, until: float, kind: str, line: int) -> Process:
        start = self._engine.now
        if until <= start:
            return
        yield until
        self._waited(kind, line, start)

    def _waited(self, kind: str, line: int, start: float) -> None:
        now = self._engine.now
        self.waits[kind, line] += now - start
        if self._timeline is not None:
            self._timeline.add(
                self.name, f"wait: {wait_name(self.cluster.script.program, kind, line)}", start, now
            )

    def _block(self, kind: str, line: int, start: float, what: str) -> Process:
        """Waits to be woken."""
        self.stuck = f"{self.name} waits at PTX line {line} for {what}"
        yield None
        self.stuck = ""
        self._waited(kind, line, start)

    # Events

    def _event(self, event: Event) -> Process:
        handler = _HANDLERS.get(event.kind)
        waiting = handler(self, event) if handler is not None else None
        if waiting is not None:
            yield from waiting

    def _wait(self, event: Event) -> Process:
        if event.line in self.cluster.script.polls and self._fails(event):
            return
        if event.key not in self.cluster.script.expected:
            return  # whatever arrives on it leaves no events
        barrier = self.cluster.mbarrier(event.key)
        start = self._engine.now
        if not barrier.wait(event.amount, self._wake_later):
            yield from self._block(
                "mbarrier", event.line, start, f"phase {event.amount} of {event.key}: {barrier}"
            )

    def _fails(self, event: Event) -> bool:
        """Whether a test_wait found its phase incomplete: the warp asks for the same one again."""
        following = self.trace[self._position : self._position + _LOOK_AHEAD]
        again = (e for e in following if isinstance(e, Event) and e[:3:2] == event[:3:2])
        return next((e.amount == event.amount for e in again), False)

    def _arrive(self, event: Event) -> None:
        barrier = self.cluster.mbarrier(event.key)
        owner = self.cluster.script.owners.get(event.key)
        latency = self._p.arrive_latency
        if owner is not None and owner != self.cta.position:
            latency += self._p.remote_latency
        count = event.amount
        self._engine.at(self._engine.now + latency, lambda: barrier.arrive(count))

    def _expect(self, event: Event) -> None:
        self.cluster.mbarrier(event.key).transact(event.amount)

    def _copy(self, event: Event) -> None:
        assert isinstance(event.detail, tuple)
        path, keys, _ = event.detail
        nbytes, line, p, chip = event.amount, event.line, self._p, self._chip
        barriers = [self.cluster.mbarrier(key) for key in keys]
        issued = self._engine.now
        rows = max(nbytes / _ROW, p.tma_issue_interval / p.tma_row_interval)
        begin, end = self.sm.tma.serve(issued, rows)

        def move() -> None:
            if path == "shared":
                arrived = end + p.remote_latency
            else:
                arrived = max(chip.fetch(begin, nbytes), end + p.l2_latency) + p.tma_latency
            for sm in self._receivers(keys):
                sm.shared_bytes += nbytes
            if self._timeline is not None:
                self._timeline.add(
                    "TMA load", f"{nbytes} bytes (line {line})", issued, arrived, True
                )

            def complete() -> None:
                for barrier in barriers:
                    barrier.transact(-nbytes)

            chip.engine.at(arrived, complete)

        self._engine.at(begin, move)

    def _receivers(self, keys: tuple[Key, ...]) -> list[Sm]:
        if len(keys) == 1:
            return [self.sm]
        return self.cluster.sms[: len(keys)]

    def _store(self, event: Event) -> None:
        p, chip, nbytes = self._p, self._chip, event.amount
        group = event.key[2]
        assert isinstance(group, int)
        begin, end = self.sm.stores.serve(self._engine.now, nbytes)
        self.sm.shared_bytes += nbytes
        taken = max(chip.write(begin, nbytes), end) + p.tma_store_latency
        seen = taken + p.store_visible_latency
        self._groups.read[group] = max(self._groups.read.get(group, 0.0), taken)
        self._groups.written[group] = max(self._groups.written.get(group, 0.0), seen)
        self.cluster.drains(seen)
        if self._timeline is not None:
            name = f"{nbytes} bytes (line {event.line})"
            self._timeline.add("TMA store", name, self._engine.now, taken, True)

    def _wait_group(self, event: Event) -> Process:
        times = self._groups.read if event.detail == "reads" else self._groups.written
        until = max((t for group, t in times.items() if group <= event.amount), default=0.0)
        yield from self._sleep(until, "bulk group", event.line)

    def _mma(self, event: Event) -> None:
        assert isinstance(event.detail, tuple)
        kind, m, n, k, ctas, _, from_tensor = event.detail
        shape = MmaShape(kind, m, n, k, ctas, from_tensor)
        p = self._p
        sms = [self.sm]
        if ctas == 2:
            even = self.cta.rank & ~1
            sms = self.cluster.sms[even : even + 2]
        self._mma_issued = max(self._engine.now, self._mma_issued + p.mma_issue_interval)
        cycles = interval(shape, p)
        start = max(self._mma_issued, self._copied, *(sm.tensor.free for sm in sms))
        for sm in sms:
            sm.tensor.serve(start, cycles)
            sm.shared_bytes += shared_bytes(shape)
            if sm.timeline is not None:
                name = f"{kind} {m}x{n}x{k}" + (" pair" if ctas == 2 else "")
                sm.timeline.add("tensor core", name, start, start + cycles)
        self._mma_started = start
        self._mma_end = max(self._mma_end, start + completion(shape, p))
        self._chip.flops += shape.flops

    def _tensor_copy(self, event: Event) -> None:
        # Copies overlap with the MMAs before them once those have begun, not with those after.
        at = max(self._engine.now, self._mma_started)
        _, self._copied = self.sm.tensor_copies.serve(at, event.amount)
        self.sm.shared_bytes += event.amount
        self._mma_end = max(self._mma_end, self._copied + self._p.mma_latency)

    def _commit(self, event: Event) -> None:
        assert isinstance(event.detail, tuple)
        barriers = [self.cluster.mbarrier(key) for key in event.detail]

        def arrive() -> None:
            for barrier in barriers:
                barrier.arrive(1)

        self._engine.at(max(self._engine.now, self._mma_end), arrive)

    def _tensor_load(self, event: Event) -> None:
        port = self.sm.reads[self.index % QUARTERS]
        start, end = port.serve(self._engine.now, event.amount)
        self._tensor_loads = max(self._tensor_loads, end + self._p.tensor_read_latency)
        if self._timeline is not None:
            self._timeline.add(f"tensor memory read {self.index % QUARTERS}", "ld", start, end)

    def _tensor_store(self, event: Event) -> None:
        port = self.sm.writes[self.index % QUARTERS]
        start, end = port.serve(self._engine.now, event.amount)
        self._tensor_stores = max(self._tensor_stores, end + self._p.tensor_write_latency)
        if self._timeline is not None:
            self._timeline.add(f"tensor memory write {self.index % QUARTERS}", "st", start, end)

    def _tensor_wait(self, event: Event) -> Process:
        until = self._tensor_loads if event.detail == "loads" else self._tensor_stores
        yield from self._sleep(until, "tensor memory", event.line)

    def _barrier(self, event: Event) -> Process:
        meeting = self.cluster.meeting("barrier", event)
        latency = self._p.barrier_latency + self._p.barrier_per_warp * meeting.warps
        start = self._engine.now
        self._engine.at(start + latency, meeting.arrive)
        if event.detail == "sync" and not meeting.wait(self.go):
            yield from self._block("CTA barrier", event.line, start, str(event.key))

    def _cluster_arrive(self, event: Event) -> None:
        meeting = self.cluster.meeting("cluster", event)
        latency = self._p.cluster_barrier_latency
        if event.line in self.cluster.script.releases:
            latency += self._p.cluster_release_latency
        self._engine.at(self._engine.now + latency, meeting.arrive)

    def _cluster_wait(self, event: Event) -> Process:
        meeting = self.cluster.meeting("cluster", event)
        start = self._engine.now
        if not meeting.wait(self.go):
            yield from self._block("cluster barrier", event.line, start, str(event.key))

    def _read(self, event: Event) -> None:
        assert isinstance(event.detail, tuple)
        space, _, passes = event.detail
        p = self._p
        if space == "shared":
            _, end = self.sm.shared.serve(self._engine.now, passes)
            self.sm.shared_bytes += passes * p.shared_bandwidth
            ready = end + p.shared_latency
        elif space == "global":
            ready = self._chip.fetch(self._engine.now, passes * SECTOR)
        else:
            ready = self._engine.now + p.shared_latency
        for name in self._loading:
            self._arriving[name] = max(self._arriving.get(name, 0.0), ready)

    def _write(self, event: Event) -> None:
        assert isinstance(event.detail, tuple)
        space, _, passes = event.detail
        if space == "shared":
            self.sm.shared.serve(self._engine.now, passes)
            self.sm.shared_bytes += passes * self._p.shared_bandwidth
        elif space == "global":
            self.cluster.drains(self._chip.write(self._engine.now, passes * SECTOR))

    def _atomic(self, event: Event) -> None:
        self._read(event)
        self._write(event)

    def _launch_control(self, event: Event) -> None:
        barrier = self.cluster.mbarrier(event.key)
        latency = self._p.launch_control_latency
        self._engine.at(self._engine.now + latency, lambda: barrier.transact(-16))


_HANDLERS: dict[str, Callable[[WarpReplay, Event], Process | None]] = {
    "wait": WarpReplay._wait,
    "arrive": WarpReplay._arrive,
    "expect": WarpReplay._expect,
    "copy": WarpReplay._copy,
    "store": WarpReplay._store,
    "wait_group": WarpReplay._wait_group,
    "mma": WarpReplay._mma,
    "tensor_copy": WarpReplay._tensor_copy,
    "commit": WarpReplay._commit,
    "tensor_load": WarpReplay._tensor_load,
    "tensor_store": WarpReplay._tensor_store,
    "tensor_wait": WarpReplay._tensor_wait,
    "barrier": WarpReplay._barrier,
    "cluster_arrive": WarpReplay._cluster_arrive,
    "cluster_wait": WarpReplay._cluster_wait,
    "read": WarpReplay._read,
    "write": WarpReplay._write,
    "atomic": WarpReplay._atomic,
    "launch_control": WarpReplay._launch_control,
}
