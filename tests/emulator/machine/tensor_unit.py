"""A warp's side of the tensor core: the order of the tcgen05 instructions it issues."""

from typing import TYPE_CHECKING

from tests.emulator.findings import UnwaitedLoad
from tests.emulator.memory.clocks import Clock, Events, Origin, Snapshot
from tests.emulator.memory.shadow import Access

if TYPE_CHECKING:
    from tests.emulator.machine.warp import Warp


class TensorUnit:
    """Components and clocks of one warp's tcgen05 work.

    mma, cp and shift run in issue order: one component, whose clock advances with each commit. The
    PTX ISA promises less (tcgen05 memory consistency, pipelined instructions); see
    ``Gpu.strict_pipe_order``. ld and st are separate components, whose clocks advance with each
    wait.

    Attributes:
        pipe, loads, stores: components; ``*_clock`` are the current clocks.
        phases: by component of an mbarrier, the phase in which this warp's latest commit arrived:
            the number of phases that precede the arrival, hence also those of later commits.
    """

    def __init__(self, warp: "Warp") -> None:
        self._warp = warp
        self.collected: dict[str, int] = {}  # collector buffer -> operand in the buffer
        self.phases: Clock = {}
        events: Events = warp.launch.events
        self.pipe = events.new_component()
        self.pipe_clock = 1
        self.loads = events.new_component()
        self.loads_clock = 1
        self.stores = events.new_component()
        self.stores_clock = 1
        self._events: dict[object, int] = {}

    @property
    def queue(self) -> tuple[str, int]:
        return ("pipe", self.pipe)

    def _event(self, component: int, clock: int, line: int, verb: str, proxy: str) -> int:
        key = (component, clock, line, verb)
        found = self._events.get(key)
        if found is None:
            warp = self._warp
            origin = Origin(verb, proxy, False, lambda: warp.where(line))
            found = self._events[key] = warp.launch.events.new(component, clock, origin)
        return found

    def operand_access(self, before: Snapshot, line: int, verb: str, lane: int) -> Access:
        """Access of an mma or cp, issued by one lane, to shared memory."""
        access = self.pipe_access(before, line, verb, "async")
        access.unordered = frozenset(self._warp.unordered)
        access.lanes = lane
        return access

    def pipe_access(self, before: Snapshot, line: int, verb: str, proxy: str = "tensor") -> Access:
        """Access of mma, cp or shift, by default to tensor memory; ``before``: clocks at issue."""
        launch = self._warp.launch
        event = self._event(self.pipe, self.pipe_clock, line, verb, proxy)
        return Access(launch.events, event, before, before.known[proxy], launch.report, self.pipe)

    def copy_access(self, before: Snapshot, line: int) -> Access:
        """Write of a cp to tensor memory; with a strict pipe, not ordered after earlier work."""
        access = self.pipe_access(before, line, "tcgen05.cp write")
        if self._warp.launch.gpu.strict_pipe_order:
            access.pipe = 0
        return access

    def load_access(self, line: int) -> Access:
        launch, before = self._warp.launch, self._warp.actor.snapshot()
        event = self._event(self.loads, self.loads_clock, line, "tcgen05.ld read", "tensor")
        if UnwaitedLoad in launch.gpu.tolerated:
            self.wait_loads()
        return Access(launch.events, event, before, before.known["tensor"], launch.report)

    def store_access(self, line: int) -> Access:
        launch, before = self._warp.launch, self._warp.actor.snapshot()
        event = self._event(self.stores, self.stores_clock, line, "tcgen05.st write", "tensor")
        # Stores of one warp are ordered.
        return Access(
            launch.events, event, before, before.known["tensor"], launch.report, self.stores
        )

    def commit(self) -> int:
        """Close the work issued so far; returns its clock."""
        self.pipe_clock += 1
        return self.pipe_clock - 1

    def wait_loads(self) -> None:
        self._warp.actor.finished(self.loads, self.loads_clock, tensor=True)
        self.loads_clock += 1

    def wait_stores(self) -> None:
        self._warp.actor.finished(self.stores, self.stores_clock, tensor=True)
        self.stores_clock += 1
