"""One kernel launch: its checked configuration, and all state of its lifetime."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from tests.emulator.findings import (
    CooperativeLaunchTooLarge,
    EmulatorError,
    IllegalInstruction,
    LaunchError,
)
from tests.emulator.machine.counters import Counters
from tests.emulator.machine.cta import Cta
from tests.emulator.machine.residency import Needs, needs_of
from tests.emulator.machine.schedule import Schedule
from tests.emulator.machine.trace import CtaTrace, WarpTrace
from tests.emulator.machine.warp import Warp
from tests.emulator.memory.linear import LinearMemory
from tests.emulator.memory.published import GLOBAL, Place, Published, poll_key
from tests.emulator.ptx.shared_arrays import end_of
from tests.emulator.windows import PARAMETER_WINDOW

if TYPE_CHECKING:
    from tests.emulator.codegen import Program
    from tests.emulator.machine.chain import Link
    from tests.emulator.machine.gpu import Gpu
    from tests.emulator.machine.scheduler import Scheduler
    from tests.emulator.memory.clocks import Events

Dimensions = tuple[int, int, int]

MAX_GRID_YZ = 65535  # for every compute capability


def _count(dimensions: Dimensions) -> int:
    return dimensions[0] * dimensions[1] * dimensions[2]


class Launch:
    """Grid to run, with its checked configuration.

    Args:
        gpu: the chip.
        program: the kernel's generated code.
        grid: CTAs along each axis, a multiple of ``cluster``.
        block: threads of a CTA along each axis.
        cluster: CTAs of a cluster along each axis.
        dynamic_shared: bytes of dynamic shared memory.
        parameters: one value per kernel parameter, as the bytes of its declared size.
        schedule: order of everything that hardware leaves open.
        attributes: further launch attributes by name; ``programmatic_stream_serialization`` lets
            the launch overlap its predecessor, the others are only recorded.
        stream: stream of the launch.
        traced: whether to record every warp's work, for the timing model.
        registers: registers per thread; 0 for unknown.

    Attributes:
        needs: SM resources that each CTA takes.
        clusters: clusters of the grid, ``cluster_size`` CTAs each.
        link, scheduler, events: position in the chain, scheduler of the chain, and the events that
            record the launch's accesses.
        known: components of earlier launches that the launch is ordered after from the start.
        shared_bytes: bytes of shared memory per CTA on a real device.
        memory_bytes: bytes of shared memory per CTA with the guards between the arrays.

    Raises:
        LaunchError: the device would refuse the launch; nothing has run.
    """

    def __init__(
        self,
        gpu: "Gpu",
        program: "Program",
        grid: Dimensions,
        block: Dimensions,
        cluster: Dimensions,
        dynamic_shared: int,
        parameters: list[bytes],
        schedule: Schedule,
        attributes: Mapping[str, int],
        stream: int = 0,
        traced: bool = False,
        registers: int = 0,
    ) -> None:
        self.link: Link
        self.scheduler: Scheduler
        self.events: Events
        self.known: list[int] = []
        self.gpu = gpu
        self.program = program
        self.grid = grid
        self.block = block
        self.cluster = cluster
        self.dynamic_shared = dynamic_shared
        self.schedule = schedule
        self.attributes = attributes
        self.stream = stream
        self.threads = _count(block)
        self.memory_bytes = program.static_shared(dynamic_shared)
        self.shared_bytes = self.memory_bytes - program.guard_bytes
        self.needs: Needs = needs_of(self, registers)
        self._check(parameters)
        self.parameters = program.lay_out_parameters(parameters)
        self.counters = Counters(program)
        self.findings: list[EmulatorError] = []
        self._reported: set[tuple[type[EmulatorError], int]] = set()
        self._parameter_memory: LinearMemory | None = None
        self.traces: list[CtaTrace] | None = [] if traced else None
        self._open_traces: dict[Dimensions, CtaTrace] = {}
        self.published: dict[Place, Published] = {}
        self.pollers: dict[Place, list[Callable[[], None]]] = {}
        self.cta_group = 0
        self._next = 0
        self.cluster_size = _count(cluster)
        self._order = gpu.clusters_to_run(_count(grid) // self.cluster_size)
        self.clusters = len(self._order)

    def _check(self, parameters: list[bytes]) -> None:
        limits, kernel = self.gpu.limits, self.program.kernel
        name = kernel.name
        for label, value in (("grid", self.grid), ("block", self.block), ("cluster", self.cluster)):
            if min(value) < 1:
                raise LaunchError(f"{label}: {value}, every extent must be at least 1")
        if max(self.grid[1:]) > MAX_GRID_YZ:
            raise LaunchError(f"grid: {self.grid}, the limit of y and z is {MAX_GRID_YZ}")
        if self.threads > limits.threads:
            raise LaunchError(f"block: {self.threads} threads, the limit is {limits.threads}")
        if kernel.required_block and kernel.required_block != self.block:
            raise LaunchError(
                f"block: {self.block}, {name} is compiled for .reqntid {kernel.required_block}"
            )
        if kernel.max_block and self.threads > kernel.max_block:
            raise LaunchError(
                f"block: {self.threads} threads, {name} is compiled for .maxntid {kernel.max_block}"
            )
        warps = -(-self.threads // 32)
        if kernel.max_registers and kernel.max_registers * 32 * warps > limits.registers:
            raise LaunchError(
                f"registers: .maxnreg {kernel.max_registers} for {warps} warps are more than the "
                f"{limits.registers} of an SM"
            )
        if kernel.required_cluster and kernel.required_cluster != self.cluster:
            raise LaunchError(
                f"cluster: {self.cluster}, {name} is compiled for clusters of "
                f"{kernel.required_cluster}"
            )
        if any(g % c for g, c in zip(self.grid, self.cluster, strict=True)):
            raise LaunchError(f"grid: {self.grid} is not a multiple of the cluster {self.cluster}")
        if _count(self.cluster) > limits.cluster:
            raise LaunchError(
                f"cluster: {_count(self.cluster)} CTAs, the limit is {limits.cluster}"
            )
        if self.shared_bytes > limits.shared:
            raise LaunchError(
                f"shared memory: {self.shared_bytes} bytes with {self.dynamic_shared} dynamic, a "
                f"CTA has {limits.shared}"
            )
        if self.attributes.get("cooperative") and _count(self.grid) > self._resident_ctas():
            raise CooperativeLaunchTooLarge(
                f"grid: {_count(self.grid)} CTAs in a cooperative launch, the device holds "
                f"{self._resident_ctas()} at once"
            )
        arrays = kernel.shared_arrays
        if arrays and self.dynamic_shared != end_of(arrays):
            raise LaunchError(
                f"dynamic shared memory: {self.dynamic_shared} bytes, the arrays of {name} end at "
                f"{end_of(arrays)}; without guards its size may be any"
            )
        declared = kernel.parameters
        if len(parameters) != len(declared):
            raise LaunchError(
                f"parameters: {len(parameters)} given, {name} declares {len(declared)}"
            )
        for index, (given, variable) in enumerate(zip(parameters, declared, strict=True)):
            if len(given) != variable.nbytes:
                raise LaunchError(
                    f"parameter {index}: {len(given)} bytes, {name} declares {variable.nbytes}"
                )

    def _resident_ctas(self) -> int:
        limits = self.gpu.limits
        return limits.sms * self.needs.per_sm(limits)

    @property
    def resident_clusters(self) -> int:
        """Number of clusters that the chip holds at once, without regard to GPCs."""
        return max(1, self._resident_ctas() // self.cluster_size)

    def written(self, place: Place) -> None:
        """Wake the warps that poll a place, after a strong write to it."""
        self.scheduler.polls = 0
        # Another launch of the chain may poll global memory, but never this launch's shared memory.
        launches = self.scheduler.launches if place[0] == GLOBAL else [self]
        for launch in launches:
            for wake in launch.pollers.pop(poll_key(place), ()):
                wake()

    @property
    def label(self) -> str:
        """Prefix of report lines: the kernel's name if several launches run, else empty."""
        several = len(self.scheduler.launches) > 1
        return f"{self.program.kernel.name}: " if several else ""

    @property
    def has_started(self) -> bool:
        return self._next > 0

    @property
    def has_next(self) -> bool:
        """Whether a cluster remains that is neither started nor cancelled."""
        return self._next < self.clusters

    def next_cluster(self) -> int | None:
        """Take the next cluster that is neither started nor cancelled; None at the grid's end."""
        if not self.has_next:
            return None
        self._next += 1
        return self._order[self._next - 1]

    def new_trace(self, warp: Warp) -> WarpTrace | None:
        """New list for a warp's trace; None if the launch is not traced."""
        if self.traces is None:
            return None
        cta = warp.cta
        if warp.index == 0:
            trace = CtaTrace(cta.position, cta.cluster.number, cta.rank, [])
            self.traces.append(trace)
            self._open_traces[cta.position] = trace
        record: WarpTrace = []
        self._open_traces[cta.position].warps.append(record)
        return record

    def use_cta_group(self, group: int) -> None:
        """Check that all tcgen05 instructions of a kernel name the same cta_group (PTX ISA)."""
        if self.cta_group not in (0, group):
            raise IllegalInstruction(
                f"cta_group::{group} in a kernel that has used cta_group::{self.cta_group}"
            )
        self.cta_group = group

    def clock(self, warp: Warp) -> int:
        """A monotonic clock that counts the warp's executed blocks, not cycles."""
        return sum(warp.blocks_run)

    def sm_of(self, cta: Cta) -> int:
        if self.gpu.sharing is not None:
            return cta.sm.number
        x, y, z = cta.position
        linear = x + self.grid[0] * (y + self.grid[1] * z)
        return linear % self.gpu.limits.sms

    def parameter_memory(self) -> LinearMemory:
        """The parameters as read-only memory, for generic loads."""
        if self._parameter_memory is None:
            size = -(-max(len(self.parameters), 16) // 16) * 16
            data = np.frombuffer(self.parameters.ljust(size, b"\0"), np.uint8)
            self._parameter_memory = LinearMemory(
                "parameters", PARAMETER_WINDOW, data, 4, True, False, "parameter"
            )
        return self._parameter_memory

    def report(self, finding: EmulatorError) -> None:
        """Record a finding, and raise the finding unless the chip tolerates its kind."""
        if not isinstance(finding, self.gpu.tolerated):
            raise finding
        line = finding.where.line if finding.where else 0
        if (type(finding), line) not in self._reported:
            self._reported.add((type(finding), line))
            self.findings.append(finding)
            self.gpu.findings.append(finding)
