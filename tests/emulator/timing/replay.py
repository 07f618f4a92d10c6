"""Timed replay of the traces of one cluster's warps."""

from collections import Counter, defaultdict
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.emulator.machine.trace import SECTOR, CtaTrace, Event, Key, WarpTrace
from tests.emulator.timing.barriers import MBarrier, Meeting
from tests.emulator.timing.chip import QUARTERS, Sm
from tests.emulator.timing.errors import TimingError
from tests.emulator.timing.roles import place, wait_name
from tests.emulator.timing.segments import STORES, Segment
from tests.emulator.timing.tensor_core import MmaShape, completion, interval, shared_bytes

if TYPE_CHECKING:
    from tests.emulator.timing.grid import Grid

_ROW = 128  # bytes of a box that the copy engine handles at once
_LOOK_AHEAD = 64
_WARP_ROWS = 16  # rows of a warp, out of the 64 of a wgmma
Process = Generator[float | None, None, None]


class ClusterReplay:
    """Timed replay of one cluster on its SMs.

    Args:
        grid: grid of the cluster.
        number: number of the cluster in the grid.
        ctas: traces of the CTAs, by rank.
        sms: the SM of each rank.
        repetition: number of the repetition of the same traces; each repetition has separate
            memory.
        done: called when the last warp and its writes have ended.
    """

    def __init__(
        self,
        grid: "Grid",
        number: int,
        ctas: list[CtaTrace],
        sms: list[Sm],
        repetition: int,
        done: "Callable[[ClusterReplay], None]",
    ) -> None:
        self.grid = grid
        self.chip = grid.chip
        self.number = number
        self.repetition = repetition
        self.script = grid.prepared.script
        self.sms = sms
        self.mbarriers: dict[Key, MBarrier] = {}
        self.meetings: dict[tuple[str, Key, int], Meeting] = {}
        self._allocations: dict[tuple[int, int], Meeting] = {}
        self._asked: Counter[int] = Counter()
        self._done = done
        self._drained = 0.0
        where = f"{grid.prefix}cluster {number}"
        self.warps = [
            WarpReplay(self, cta, index, trace, f"{where} CTA {cta.rank} warp {index}")
            for cta in ctas
            for index, trace in enumerate(cta.warps)
        ]
        self._running = Counter(warp.cta.rank for warp in self.warps)

    def start(self) -> None:
        for warp in self.warps:
            warp.go()

    def mbarrier(self, key: Key) -> MBarrier:
        found = self.mbarriers.get(key)
        if found is None:
            found = self.mbarriers[key] = MBarrier(self.script.expected[key])
        return found

    def meeting(self, kind: str, event: Event) -> Meeting:
        key = (kind, event.key, event.amount)
        found = self.meetings.get(key)
        if found is None:
            found = self.meetings[key] = Meeting(self.script.meetings[key])
        return found

    def allocation(self, rank: int, ctas: int, columns: int) -> Meeting:
        """Next allocation of a CTA or its pair, complete once all SMs have columns.

        A pair's first request allocates for both CTAs.
        """
        first = rank & -ctas
        key = (first, self._asked[rank])
        self._asked[rank] += 1
        found = self._allocations.get(key)
        if found is None:
            found = self._allocations[key] = Meeting(ctas)
            for sm in self.sms[first : first + ctas]:
                if sm.columns.take(columns, found.arrive):
                    found.arrive()
        return found

    def drains(self, until: float) -> None:
        """Note writes in flight until ``until``; the cluster keeps its SMs until then."""
        self._drained = max(self._drained, until)

    def warp_ended(self, rank: int) -> None:
        """Count the end of a warp; a CTA whose last warp has ended releases the next launch."""
        self._running[rank] -= 1
        if not self._running[rank]:
            del self._running[rank]
            self.grid.release(self.number, rank)
        if not self._running:
            self.chip.engine.at(self._drained, lambda: self._done(self))


@dataclass
class _Groups:
    """Cycles when each group of copies has been read, and when it has been written."""

    read: dict[int, float] = field(default_factory=dict)
    written: dict[int, float] = field(default_factory=dict)

    def add(self, group: int, read: float, written: float) -> None:
        self.read[group] = max(self.read.get(group, 0.0), read)
        self.written[group] = max(self.written.get(group, 0.0), written)


class WarpReplay:
    """Timed replay of one warp's trace.

    Attributes:
        name: name in timelines.
        started, ended: cycles of the warp's start and end, or None.
        running: cycles in segments; ``alone`` counts the cycles without contention by other warps.
        waits: cycles by kind of wait and PTX line.
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
        self._grid = cluster.grid
        self._engine = cluster.chip.engine
        self._p = cluster.chip.p
        self._scheduler = self.sm.schedulers[index % len(self.sm.schedulers)]
        self._timeline = self.sm.timeline
        self._process = self._run()
        self._position = 0
        self._loading: tuple[str, ...] = ()
        self._arriving: dict[str, float] = {}  # loads under way, by register
        self._groups: defaultdict[object, _Groups] = defaultdict(_Groups)
        self._async_copied = 0.0  # cp.async
        self._mma_end = 0.0
        self._mma_started = 0.0
        self._mma_issued = 0.0
        self._copied = 0.0  # tcgen05.cp
        self._multiplied = 0.0  # the last wgmma; ends of the groups committed
        self._multiplies: list[float] = []
        self._tensor_loads = 0.0
        self._tensor_stores = 0.0
        self.started: float | None = None
        self.ended: float | None = None
        self.running = 0.0
        self.alone = 0.0
        self.waits: defaultdict[tuple[str, int], float] = defaultdict(float)
        self.stuck: str = ""

    def go(self) -> None:
        """Run until the warp sleeps or waits."""
        now = self._engine.now
        if self.started is None:
            self.started = now
        try:
            wake = next(self._process)
        except StopIteration:
            self.ended = self._engine.now
            self.cluster.warp_ended(self.cta.rank)
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
                yield from self._event(item)  # an event without an instruction known to the model
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
                stored = STORES in segment.waits
                yield from self._sleep(until, "fence" if stored else "load", segment.line)
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
        """Stall cycles between two segments, due to results still in a pipe and to the jump."""
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
        """Block until another action wakes the warp."""
        self.stuck = f"{self.name} waits at PTX line {line} for {what}"
        yield None
        self.stuck = ""
        self._waited(kind, line, start)

    # Events

    def _event(self, event: Event) -> Process:
        handler = _HANDLERS.get(event.kind)
        if handler is None:
            raise TimingError(f"event {event.kind!r} of PTX line {event.line}: has no model")
        waiting = handler(self, event)
        if waiting is not None:
            yield from waiting

    def _wait(self, event: Event) -> Process:
        if not event.detail and (
            event.line in self.cluster.script.polls or not self._asks_again(event)
        ):
            return  # a single poll
        barrier = self.cluster.mbarrier(event.key)
        start = self._engine.now
        if not barrier.wait(event.amount, self._wake_later):
            yield from self._block(
                "mbarrier", event.line, start, f"phase {event.amount} of {event.key}: {barrier}"
            )

    def _asks_again(self, event: Event) -> bool:
        """Whether a failed try_wait is followed by another try_wait for the same phase."""
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
        act = barrier.drop if event.kind == "drop" else barrier.arrive
        self._engine.at(self._engine.now + latency, lambda: act(count))

    def _complete(self, event: Event) -> None:
        self.cluster.mbarrier(event.key).transact(-event.amount)

    def _expect(self, event: Event) -> None:
        self.cluster.mbarrier(event.key).transact(event.amount)

    def _copy(self, event: Event) -> None:
        assert isinstance(event.detail, tuple)
        path, keys, _ = event.detail
        nbytes, line, p, chip = event.amount, event.line, self._p, self._chip
        barriers = [self.cluster.mbarrier(key) for key in keys]
        issued = self._engine.now

        def complete() -> None:
            for barrier in barriers:
                barrier.transact(-nbytes)

        if path == "remote":  # st.async and red.async do not go through the copy engine
            _, sent = self.sm.peers.serve(issued, nbytes)
            self._engine.at(sent + p.peer_store_latency, complete)
            return
        rows = max(nbytes / _ROW, p.tma_issue_interval / p.tma_row_interval)
        begin, end = self.sm.tma.serve(issued, rows)
        if event.key:
            begin = max(begin, self._grid.map_ready(self.sm, event.key, begin))

        def move() -> None:
            if path == "shared":
                arrived = end + p.remote_latency
            else:
                fetched = self._grid.fetch(self.sm, begin, event.where, nbytes)
                arrived = max(fetched, end + p.l2_latency) + p.tma_latency
            for sm in self._receivers(keys):
                sm.shared_bytes += nbytes
            if self._timeline is not None:
                self._timeline.add(
                    "TMA load", f"{nbytes} bytes (line {line})", issued, arrived, True
                )

            chip.engine.at(arrived, complete)

        self._engine.at(begin, move)

    def _receivers(self, keys: tuple[Key, ...]) -> list[Sm]:
        if len(keys) == 1:
            return [self.sm]
        return self.cluster.sms[: len(keys)]

    def _store(self, event: Event) -> None:
        p, nbytes = self._p, event.amount
        group = event.key[2]
        assert isinstance(group, int)
        begin, end = self.sm.stores.serve(self._engine.now, nbytes)
        self.sm.shared_bytes += nbytes
        taken = max(self._grid.write(begin, nbytes), end) + p.tma_store_latency
        seen = taken + p.store_visible_latency
        self._groups[event.key[1]].add(group, taken, seen)
        self.cluster.drains(seen)
        if self._timeline is not None:
            name = f"{nbytes} bytes (line {event.line})"
            self._timeline.add("TMA store", name, self._engine.now, taken, True)

    def _wait_group(self, event: Event) -> Process:
        groups = self._groups[event.key[1]]
        times = groups.read if event.detail == "reads" else groups.written
        until = max((t for group, t in times.items() if group <= event.amount), default=0.0)
        yield from self._sleep(until, "copy group", event.line)

    def _async_copy(self, event: Event) -> None:
        assert isinstance(event.detail, tuple)
        lanes, sectors, passes, tags = event.detail
        group = event.key[2]
        assert isinstance(group, int)
        p, now = self._p, self._engine.now
        nbytes = sectors * SECTOR
        _, end = self.sm.shared.serve(now, max(passes, self._turns(tags, event.amount / lanes)))
        landed = now
        if nbytes:
            filled = self.sm.fills.serve(end, nbytes)[1]
            landed = self._grid.fetch(self.sm, now, event.where, nbytes, filled)
        landed = max(landed, end) + p.async_copy_latency
        self.sm.shared_bytes += event.amount
        self._groups[event.key[1]].add(group, landed, landed)
        self._async_copied = max(self._async_copied, landed)
        if self._timeline is not None:
            name = f"{event.amount} bytes (line {event.line})"
            self._timeline.add("cp.async", name, now, landed, True)

    def _async_arrive(self, event: Event) -> None:
        barrier = self.cluster.mbarrier(event.key)
        if not event.detail:
            barrier.expect_more(event.amount)
        at = max(self._engine.now, self._async_copied) + self._p.arrive_latency
        self._engine.at(at, lambda: barrier.arrive(event.amount))

    def _prefetch(self, event: Event) -> None:
        self._grid.prefetch(self.sm, self._engine.now, event.where, event.amount)

    def _turns(self, tags: int, width: float) -> float:
        """Cycles on the path to L1 of an access to ``tags`` lines, of ``width`` bytes per lane."""
        return tags * max(1.0, width / self._p.l1_lane_bytes)

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

    def _tensor_alloc(self, event: Event) -> Process:
        assert isinstance(event.detail, int)
        granted = self.cluster.allocation(self.cta.rank, event.detail, event.amount)
        start = self._engine.now
        if not granted.wait(self.go):
            what = f"{event.amount} columns"
            yield from self._block("tensor memory", event.line, start, what)

    def _tensor_free(self, event: Event) -> None:
        columns = self.sm.columns
        self._engine.at(self._engine.now, lambda: columns.give(event.amount))

    def _tensor_copy(self, event: Event) -> None:
        # Copies overlap with preceding MMAs once these have begun, not with later MMAs.
        at = max(self._engine.now, self._mma_started)
        assert isinstance(event.detail, int)
        first = self.cta.rank & -event.detail
        for sm in self.cluster.sms[first : first + event.detail]:
            _, end = sm.tensor_copies.serve(at, event.amount)
            self._copied = max(self._copied, end)
            sm.shared_bytes += event.amount
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
        self._engine.at(self._engine.now + self._p.cluster_barrier_latency, meeting.arrive)

    def _cluster_wait(self, event: Event) -> Process:
        meeting = self.cluster.meeting("cluster", event)
        start = self._engine.now
        if not meeting.wait(self.go):
            yield from self._block("cluster barrier", event.line, start, str(event.key))

    def _read(self, event: Event) -> None:
        assert isinstance(event.detail, tuple)
        space, lanes, passes, tags = event.detail
        p, sm, now = self._p, self.sm, self._engine.now
        if space == "shared":
            _, end = sm.shared.serve(now, passes)
            sm.shared_bytes += passes * p.shared_bandwidth
            ready = end + p.shared_latency
        else:
            _, end = sm.shared.serve(now, self._turns(tags, event.amount / lanes))
            ready = end + p.l1_latency
            if space == "global":
                ready = max(ready, self._from_global(event, passes, end))
        for name in self._loading:
            self._arriving[name] = max(self._arriving.get(name, 0.0), ready)

    def _from_global(self, event: Event, sectors: int, at: float) -> float:
        """Cycle when a load's sectors have arrived, from L1 as far as L1 holds them."""
        sm, grid, now = self.sm, self._grid, self._engine.now
        if event.line not in self.cluster.script.cached:
            nbytes = sectors * SECTOR
            return grid.fetch(sm, now, event.where, nbytes, sm.fills.serve(at, nbytes)[1])
        runs = [run for run in event.where if isinstance(run, tuple)]
        l1 = grid.l1(sm)
        missing, ready = l1.look(runs, self.cluster.repetition)
        if missing:
            nbytes = len(missing) * SECTOR
            filled = sm.fills.serve(at, nbytes)[1]
            fetched = grid.fetch(sm, now, event.where, nbytes, filled)
            l1.fill(missing, fetched)
            ready = max(ready, fetched)
        return ready

    def _write(self, event: Event) -> None:
        assert isinstance(event.detail, tuple)
        space, lanes, passes, tags = event.detail
        sm, now = self.sm, self._engine.now
        if space == "shared":
            sm.shared.serve(now, passes)
            sm.shared_bytes += passes * self._p.shared_bandwidth
            return
        if space == "peer":
            _, sent = sm.peers.serve(now, event.amount)
            self._stored(sent + self._p.peer_store_latency)
            return
        _, end = sm.shared.serve(now, self._turns(tags, event.amount / lanes))
        if space == "global":
            nbytes = passes * SECTOR
            # A cycle for each sector and for each line (H200: 65 for 32 lines, 41 for 8).
            _, out = sm.stores.serve(end, nbytes + tags * SECTOR)
            written = max(out, self._grid.write(now, nbytes))
            self.cluster.drains(written)
            self._stored(written + self._p.store_visible_latency)

    def _stored(self, until: float) -> None:
        """Note a store in flight until ``until``, for which a fence of the device waits."""
        self._arriving[STORES] = max(self._arriving.get(STORES, 0.0), until)

    def _map(self, event: Event) -> None:
        self._grid.map_ready(self.sm, event.key, self._engine.now)

    def _atomic(self, event: Event) -> None:
        self._read(event)
        self._write(event)

    def _launch_control(self, event: Event) -> None:
        barrier = self.cluster.mbarrier(event.key)
        latency = self._p.launch_control_latency
        self._engine.at(self._engine.now + latency, lambda: barrier.transact(-16))

    def _dependency(self, event: Event) -> Process:
        if event.detail == "launch_dependents":
            self._grid.release(self.cluster.number, self.cta.rank)
            return
        before = self._grid.before
        start = self._engine.now
        if before is not None and not before.wait(self.go):
            yield from self._block("grid before", event.line, start, "the grid before this one")

    def _warpgroup_mma(self, event: Event) -> None:
        """Execute this warp's 16 rows of a wgmma on its scheduler's part of the tensor core."""
        assert isinstance(event.detail, tuple)
        n, k, from_registers = event.detail
        p, sm = self._p, self.sm
        part = self.index % len(sm.schedulers)
        cycles = max(n / p.warpgroup_columns, p.warpgroup_least if from_registers else 0.0)
        begin, end = sm.warpgroup[part].serve(self._engine.now, cycles)
        # The four warps of a warpgroup share B; each loads a quarter of A.
        sm.shared_bytes += 2 * k * (n / 4 + (0 if from_registers else _WARP_ROWS))
        self._multiplied = end + p.warpgroup_latency
        self._chip.flops += 2 * _WARP_ROWS * n * k
        if self._timeline is not None:
            self._timeline.add(f"tensor core part {part}", f"wgmma {n}x{k}", begin, end)

    def _warpgroup_commit(self, event: Event) -> None:
        self._multiplies.append(self._multiplied)

    def _warpgroup_wait(self, event: Event) -> Process:
        """Wait for all groups except the latest ``event.amount``; groups end in order."""
        known = len(self._multiplies) - event.amount
        until = self._multiplies[known - 1] if known > 0 else 0.0
        yield from self._sleep(until, "wgmma", event.line)


def _nothing(warp: WarpReplay, event: Event) -> None:
    """Ignore an event that only describes other events."""


_HANDLERS: dict[str, Callable[[WarpReplay, Event], Process | None]] = {
    "init": _nothing,
    "drop": WarpReplay._arrive,
    "complete": WarpReplay._complete,
    "async_copy": WarpReplay._async_copy,
    "async_arrive": WarpReplay._async_arrive,
    "prefetch": WarpReplay._prefetch,
    "map": WarpReplay._map,
    "tensor_alloc": WarpReplay._tensor_alloc,
    "tensor_free": WarpReplay._tensor_free,
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
    "dependency": WarpReplay._dependency,
    "warpgroup_mma": WarpReplay._warpgroup_mma,
    "warpgroup_commit": WarpReplay._warpgroup_commit,
    "warpgroup_wait": WarpReplay._warpgroup_wait,
}
