"""Findings of the emulator: one exception class per kind of mistake, each naming its place.

Every mistake of a kernel is an :class:`EmulatorError`. The parts of the machine raise the error
with the fact alone; the executing warp adds the place (:meth:`EmulatorError.at`), so that every
report names the PTX line, the warp, the CTA and, where the PTX has ``.loc`` lines, the kernel's
source line.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Where:
    """Place of a finding: the PTX line, and the CTA and warp that executed it.

    Attributes:
        kernel: entry name.
        line: 1-based line of the PTX text.
        text: text of the line.
        source: ``file:line`` of the kernel's source, empty where the PTX does not say.
        cta: block index (x, y, z) in the grid, or None before any CTA runs.
        warp: warp index in its CTA, or None.
    """

    kernel: str
    line: int
    text: str
    source: str = ""
    cta: tuple[int, int, int] | None = None
    warp: int | None = None

    def __str__(self) -> str:
        who = "" if self.cta is None else f"CTA {self.cta} warp {self.warp}, "
        source = f" ({self.source})" if self.source else ""
        return f"{who}PTX line {self.line}{source}: {self.text.strip()}"


class EmulatorError(Exception):
    """A mistake of the kernel, or a feature that the emulator does not model.

    Attributes:
        fact: the mistake, without the place.
        where: the place, once known.
    """

    def __init__(self, fact: str, where: Where | None = None) -> None:
        super().__init__(fact)
        self.fact = fact
        self.where = where

    def at(self, where: Where) -> "EmulatorError":
        """This error, with the place of the raising instruction unless a place is set already."""
        if self.where is None:
            self.where = where
        return self

    def __str__(self) -> str:
        return self.fact if self.where is None else f"{self.fact}\n  at {self.where}"


class UnknownInstruction(EmulatorError):
    """An instruction, or a form of an instruction, that the emulator does not model."""


class IllegalInstruction(EmulatorError):
    """An instruction whose operands, descriptors or shapes the PTX ISA does not allow."""


class PtxSyntaxError(EmulatorError):
    """Text that the parser cannot read as PTX."""


class LaunchError(EmulatorError):
    """A launch configuration or parameter list that the device would refuse."""


class CooperativeLaunchTooLarge(LaunchError):
    """A cooperative launch of more CTAs than the device holds at once."""


class OutOfBounds(EmulatorError):
    """An access outside of every allocation, or across the end of an allocation."""


class ArrayOverrun(OutOfBounds):
    """An access that runs past the end of one array of shared memory into the next."""


class Misaligned(EmulatorError):
    """An address that is not a multiple of the required alignment."""


class UninitialisedRead(EmulatorError):
    """A read of uninitialised shared, tensor, local or global memory."""


class DataRace(EmulatorError):
    """Two unordered accesses to the same bytes, at least one of them a write."""


class MissingProxyFence(DataRace):
    """A generic-proxy write that the async proxy may not see: fence.proxy.async is missing."""


class MissingTensorFence(DataRace):
    """Two tensor-memory accesses ordered by a barrier, but without the required tcgen05.fence."""


class MissingDependencyWait(DataRace):
    """Access to data of an overlapping launch without griddepcontrol.wait."""


class NarrowScope(DataRace):
    """Two accesses ordered only by a release or acquire whose scope excludes the other CTA."""


class UnwaitedLoad(EmulatorError):
    """Store, branch or exchange that uses the result of a tcgen05.ld before tcgen05.wait::ld."""


class UnwaitedMma(EmulatorError):
    """A register of a wgmma in flight is used before wgmma.wait_group."""


class MissingRegisterFence(EmulatorError):
    """A wgmma uses registers that another instruction has accessed since the last wgmma.fence."""


class UnstartedPeer(EmulatorError):
    """Access to a peer CTA that may not have started."""


class ExitedPeer(EmulatorError):
    """Access to the memory of a CTA that has exited, or may exit before the access."""


class LaneReach(EmulatorError):
    """A tcgen05.ld or .st that names lanes outside the warp's quarter of tensor memory."""


class RegisterBudget(EmulatorError):
    """setmaxnreg that not all warps of a warpgroup execute, or that requests too many registers."""


class UnfinishedStore(EmulatorError):
    """Exit of a CTA whose bulk stores may still read its shared memory."""


class Deadlock(EmulatorError):
    """Deadlock: no warp can proceed and no asynchronous work is in flight."""


class Livelock(EmulatorError):
    """Warps that spin, with no pending work that could end their spinning."""


class BarrierMisuse(EmulatorError):
    """A barrier used against its protocol: counts, transactions, phases, lifetime."""


class LateInitialisation(BarrierMisuse):
    """An mbarrier initialised while another mbarrier of the CTA waits for arrivals or bytes.

    PTX allows this order. For sm_100 ptxas may turn the initialisation into an invalidation of the
    SM's cache of mbarriers, and kernels known to run on silicon initialise all mbarriers first. On
    sm_90, where the order has run on silicon, the finding does not exist.
    """


class ParityAliasing(BarrierMisuse):
    """Wait on an mbarrier parity that may match a phase two before or after the intended phase."""


class TensorMemoryMisuse(EmulatorError):
    """Tensor memory over-allocated, leaked, freed twice, or touched where none is allocated."""


class DivergentExecution(EmulatorError):
    """An ``.aligned`` or warp-wide instruction that not all lanes of the warp reached together.

    For wgmma: not all warps of the warpgroup execute the same instruction.
    """


class UnprovenForm(EmulatorError):
    """Form that the PTX ISA allows, and that no kernel known to run on silicon uses.

    Reported in strict modes of ``Gpu`` alone.
    """


class KernelAssertion(EmulatorError):
    """Abort by the kernel itself: trap or a failed device assertion."""
