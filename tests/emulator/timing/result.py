"""Results of the timing model."""

from dataclasses import dataclass, field

from tests.emulator.timing.parameters import Parameters
from tests.emulator.timing.timeline import Timeline


@dataclass(frozen=True)
class WarpTime:
    """Cycles of a warp's life, by cause.

    Attributes:
        name: CTA rank and warp index.
        role: main work of the warp, with the line of the kernel's source, if known.
        total: cycles from the CTA's start to the warp's end.
        running: cycles of issue; ``contended`` is the part caused by other warps of the scheduler.
        waiting: cycles by cause of the wait, the longest first.
    """

    name: str
    role: str
    total: float
    running: float
    contended: float
    waiting: dict[str, float]


@dataclass(frozen=True)
class Timing:
    """One launch's modelled time.

    Attributes:
        kernel: entry name.
        parameters: parameters of the model.
        cycles: cycles of the kernel on the GPU, without launch overhead.
        launch_us: launch overhead.
        clusters: number of clusters of the grid, which run in ``waves`` full or partial waves of
            ``resident`` clusters.
        exact: whether every cluster was simulated; otherwise, representatives of similar clusters.
        busy: fraction of the kernel's time that each unit works, averaged over all SMs of the chip.
        flops: operations of the tensor cores in the whole grid.
        read_bytes, hbm_bytes: bytes that SMs read from L2, and bytes that L2 reads from HBM.
        warps: warps of the first simulated cluster.
        timeline: timeline of the first SM.
        notes: further remarks.
    """

    kernel: str
    parameters: Parameters
    cycles: float
    launch_us: float
    clusters: int
    waves: int
    resident: int
    exact: bool
    busy: dict[str, float]
    flops: float
    read_bytes: float
    hbm_bytes: float
    warps: list[WarpTime]
    timeline: Timeline
    notes: list[str] = field(default_factory=list)

    @property
    def microseconds(self) -> float:
        """Microseconds of the kernel itself, without launch overhead."""
        return self.parameters.microseconds(self.cycles)

    @property
    def sustained_microseconds(self) -> float:
        """Microseconds at the clock that long tensor-bound kernels sustain at the power limit."""
        return self.cycles / self.parameters.sustained_clock / 1e3

    @property
    def tflops(self) -> float:
        """Tensor core TFLOP/s over the kernel's own time."""
        return self.flops / self.microseconds / 1e6 if self.cycles else 0.0

    @property
    def limit(self) -> tuple[str, float]:
        """The unit with the largest busy fraction, and that fraction.

        A fraction far below 1 means that latency, waits or an uneven grid set the time, not a unit.
        """
        return max(self.busy.items(), key=lambda item: item[1], default=("none", 0.0))

    @property
    def tensor_efficiency(self) -> float:
        """Fraction of the kernel's time in which an MMA pipe works, independent of the clock."""
        return self.busy.get("tensor core", 0.0)


@dataclass
class Simulated:
    """Result of one simulation.

    Attributes:
        cycles: cycles until the last cluster ended.
        busy: cycles of each unit's work, summed over the SMs; "L2" and "HBM" in bytes, "FLOP" in
            operations.
    """

    cycles: float
    busy: dict[str, float]
    warps: list[WarpTime]
    timeline: Timeline
