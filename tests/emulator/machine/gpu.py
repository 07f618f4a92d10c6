"""The chip: limits, memory, and kernel launches."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from tests.emulator.codegen import Program
from tests.emulator.findings import EmulatorError, LaunchError
from tests.emulator.machine.chain import Chain
from tests.emulator.machine.launch import Dimensions, Launch
from tests.emulator.machine.limits import B200, Limits
from tests.emulator.machine.residency import registers_of
from tests.emulator.machine.schedule import EAGER, Schedule
from tests.emulator.machine.sm import Sharing
from tests.emulator.memory.history import History
from tests.emulator.memory.linear import Bytes
from tests.emulator.memory.spaces import GlobalMemory
from tests.emulator.ptx.parser import parse
from tests.emulator.ptx.syntax import Module


class Gpu:
    """Functional model of one device.

    Args:
        limits: limits of the chip; ``B200`` by default, or ``H200``.
        schedule: order of everything that hardware leaves open, for launches without a schedule.
        tolerated: findings that are collected in ``Launch.findings`` instead of raised.
        strict_tensor_fences: whether a barrier orders tcgen05 accesses only with
            ``tcgen05.fence::before_thread_sync`` and ``::after_thread_sync`` around the barrier, as
            the PTX ISA demands. NVIDIA's own kernels omit the fences where an mbarrier follows a
            wait or commit.
        strict_pipe_order: whether a tcgen05.cp that overwrites the operand of an earlier MMA has to
            wait for the MMA's commit: the PTX ISA guarantees only that a cp is ordered before a
            later MMA. Every kernel with a single set of scale columns, NVIDIA's too, also relies on
            the order of a cp after an earlier MMA.
        strict_scopes: whether an mbarrier.arrive or a wait whose scope excludes the other side's
            CTA leaves TMA and tensor core accesses unordered, as the PTX ISA specifies. NVIDIA's
            own kernels omit the scope, and the default is .cta.
        strict_scale_columns: whether the scales of an MMA must begin at an even column of tensor
            memory. All known kernels begin there; the PTX ISA allows any column.
        strict_collectors: whether a block-scaled MMA must keep no operand in a collector buffer,
            as all known kernels do.
        rounds_like_h200: whether wgmma rounds sums bit-exactly as an H200 does, at up to 5 ms each.
        sharing: policy of SM sharing among CTAs; None gives each CTA an exclusive SM. See also
            :meth:`shared` and :meth:`overlapped`.

    Attributes:
        memory: global memory; ranges are registered before a launch.
        history: accesses of earlier launches to global memory.
        launches: launches so far, the latest last.
        findings: tolerated findings of all launches.
    """

    def __init__(
        self,
        limits: Limits = B200,
        schedule: Schedule = EAGER,
        tolerated: tuple[type[EmulatorError], ...] = (),
        strict_tensor_fences: bool = False,
        strict_pipe_order: bool = False,
        strict_scopes: bool = False,
        strict_scale_columns: bool = False,
        strict_collectors: bool = False,
        rounds_like_h200: bool = False,
        sharing: Sharing | None = None,
    ) -> None:
        self.limits = limits
        self.schedule = schedule
        self.tolerated = tolerated
        self.strict_tensor_fences = strict_tensor_fences
        self.strict_pipe_order = strict_pipe_order
        self.strict_scopes = strict_scopes
        self.strict_scale_columns = strict_scale_columns
        self.strict_collectors = strict_collectors
        self.rounds_like_h200 = rounds_like_h200
        self.sharing = sharing
        self._waiting: list[Launch] | None = None  # launches deferred to the end of the context
        self.memory = GlobalMemory()
        self.history = History(self.memory)
        self.findings: list[EmulatorError] = []
        self.launches: deque[Launch] = deque(maxlen=16)
        self._variables: dict[tuple[int, str], Bytes] = {}
        self._modules: dict[str, Module] = {}
        self._programs: dict[tuple[int, str, Dimensions], Program] = {}

    def load(self, ptx: str) -> Module:
        """Parse PTX; the same text is parsed once."""
        module = self._modules.get(ptx)
        if module is None:
            module = self._modules[ptx] = parse(ptx)
        return module

    def address_of(self, name: str, module: Module) -> int:
        """Address of a module-scope .global or .const variable, placed on first use."""
        key = (id(module), name)
        if key not in self._variables:
            variable = module.variables[name]
            if variable.space not in ("global", "const"):
                raise LaunchError(f"variable {name} in space .{variable.space} has no address here")
            data = np.zeros(-(-max(variable.nbytes, 16) // 128) * 128 + 128, np.uint8)
            skip = -data.ctypes.data % 128
            data = data[skip:]
            if variable.initial is not None:
                data[: len(variable.initial)] = np.frombuffer(variable.initial, np.uint8)
            writable = variable.space == "global"
            self.memory.register_array(data, name=name, writable=writable)
            self._variables[key] = data
        return self._variables[key].ctypes.data

    def clusters_to_run(self, count: int) -> Sequence[int]:
        """Numbers of the grid's clusters to run, in order."""
        return range(count)

    def synchronise(self, stream: int | None = None) -> None:
        """Wait for a stream, or for all streams: later launches cannot overlap its launches."""
        self._run_waiting()
        self.history.synchronise(stream)

    def launch(
        self,
        module: Module,
        kernel: str,
        grid: Dimensions,
        block: Dimensions,
        cluster: Dimensions = (1, 1, 1),
        dynamic_shared: int = 0,
        parameters: list[bytes] | None = None,
        attributes: Mapping[str, int] | None = None,
        schedule: Schedule | None = None,
        traced: bool = False,
        stream: int = 0,
    ) -> Launch:
        """Run one kernel to completion.

        Args:
            module: module from :meth:`load`.
            kernel: entry name.
            grid: CTAs along x, y, z.
            block: threads of a CTA along x, y, z.
            cluster: CTAs of a cluster along x, y, z.
            dynamic_shared: bytes of dynamic shared memory.
            parameters: the bytes of each kernel parameter.
            attributes: further launch attributes.
            schedule: replaces the chip's schedule.
            traced: whether to record every warp's work (``Launch.traces``), for the timing model.
            stream: handle of the stream; launches of several streams still run one after the other.

        Returns:
            The finished launch, with its counters; within :meth:`overlapped`, a launch yet to run.

        Raises:
            EmulatorError: a finding, naming the place.
        """
        if kernel not in module.kernels:
            raise LaunchError(f"kernel: {kernel!r}, the module has {sorted(module.kernels)}")
        key = (id(module), kernel, block)
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = Program(module, module.kernels[kernel], block)
        launch = Launch(
            self,
            program,
            grid,
            block,
            cluster,
            dynamic_shared,
            parameters or [],
            schedule or self.schedule,
            attributes or {},
            stream,
            traced,
            registers_of(
                program.kernel, self.sharing.registers if self.sharing else {}, self.limits
            ),
        )
        self.launches.append(launch)
        if self._waiting is None:
            Chain([launch], self.sharing).run()
        else:
            self._check_overlap(launch)
            self._waiting.append(launch)
        return launch

    @contextmanager
    def shared(self, sharing: Sharing = Sharing()) -> Iterator[None]:  # noqa: B008 — frozen
        """Context in which CTAs may be co-resident on an SM and compete for its resources."""
        before, self.sharing = self.sharing, sharing
        try:
            yield
        finally:
            self.sharing = before

    @contextmanager
    def overlapped(self, sharing: Sharing = Sharing()) -> Iterator[None]:  # noqa: B008 — frozen
        """Context whose launches overlap as far as their attributes allow.

        The launches run at the end of the context or at :meth:`synchronise`, and their results
        exist only from then on. All launches belong to one stream and run in the schedule of the
        first launch.
        """
        if self._waiting is not None:
            raise LaunchError("overlapped: within another one; leave that first")
        self._waiting = []
        try:
            with self.shared(sharing):
                yield
                self._run_waiting()
        finally:
            self._waiting = None

    def _run_waiting(self) -> None:
        if self._waiting:
            launches, self._waiting = self._waiting, []
            Chain(launches, self.sharing).run()

    def _check_overlap(self, launch: Launch) -> None:
        if self._waiting and self._waiting[0].stream != launch.stream:
            raise LaunchError(
                f"stream: {launch.stream:#x}, launches that overlap are of one stream, "
                f"{self._waiting[0].stream:#x}; synchronise() before that"
            )
