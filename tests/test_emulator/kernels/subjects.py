"""Kernels of which mutants are made: our GEMM, and the PTX of the hazard tests."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from tests.devices import EMULATED_CHIPS, Emulated
from tests.emulator import EAGER, Gpu, Schedule
from tests.emulator.machine.launch import Dimensions, Launch
from tests.emulator.machine.limits import Limits
from tests.emulator.mutate import Subject
from tests.emulator.ptx.syntax import Module
from tests.emulator.runtime import shim
from tests.mutants import Mutant
from tests.test_emulator.kernels import written
from tests.test_emulator.kernels.config import GemmConfig, Shape


class Substitute:
    """Device that runs other PTX in place of the PTX given to it.

    Attributes:
        text: PTX to run; None runs the given PTX.
        given: the last PTX given.
    """

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.text: str | None = None
        self.given = ""

    @property
    def limits(self) -> Limits:
        return self.gpu.limits

    def load(self, ptx: str) -> Module:
        self.given = ptx
        return self.gpu.load(ptx if self.text is None else self.text)

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
        *,
        stream: int = 0,
    ) -> Launch:
        return self.gpu.launch(
            module,
            kernel,
            grid,
            block,
            cluster,
            dynamic_shared,
            parameters,
            attributes,
            stream=stream,
        )

    def synchronise(self, stream: int | None = None) -> None:
        self.gpu.synchronise(stream)


# Reasons why a mutant need not be caught: patterns of the instruction and the change.
_ALONE = (
    r"tcgen05\.alloc",
    "dependents released before",
    'no fault of a launch that runs alone; "overlapped" does not',
)
REASONS = (
    (
        r"bar\.warp\.sync",
        "dropped",
        "not modelled: the lanes of a warp run in step, whatever the order between them",
    ),
    (
        "relinquish_alloc_permit",
        "dropped",
        "redundant: the permit lapses at the CTA's exit, and nobody who waits for it is waited for",
    ),
    _ALONE,
    (
        r"cp\.async\.bulk\.tensor.*cta_group::1",
        "other CTA group",
        "the same: with .cta_group::2 too the mbarrier may be in the copy's own CTA",
    ),
    (
        r"setmaxnreg\.dec",
        "dropped",
        "not modelled: PTX does not say how many registers the warps start with",
    ),
    (r"setmaxnreg\.inc", "dropped", "no fault: the warps live with fewer registers"),
    (
        r"griddepcontrol\.launch_dependents",
        "dropped",
        "no fault: dependents start once every CTA has exited",
    ),
)
_NEIGHBOURS = (_ALONE,)
_OVERLAPPED = tuple(reason for reason in REASONS if reason is not _ALONE)
_TAIL = (
    "redundant as long as commits of one thread arrive in order: the epilogue waits for a later one"
)
_FENCED = (
    "the same: tcgen05.fence beside it orders the tcgen05 instructions, and it orders no others"
)
_STORE = (
    (
        r"wait_group 0",
        "",
        "redundant: the loop has waited for the reads, and writes need no wait before the exit",
    ),
)
_CLUSTER = (
    (
        r"cluster\.arrive",
        "relaxed",
        "the same: this one only says that the peer has started, there is no data to order",
    ),
)
_INITIALISED = (
    (
        r"cluster\.arrive",
        "relaxed",
        "the same: fence.mbarrier_init publishes through it, and the other one orders no data",
    ),
)
_LAST = "redundant: nobody fills the slot again, and a wait for all groups follows"
Reasons = tuple[tuple[str, str, str], ...]


def _reason(reasons: Reasons, mutant: Mutant) -> str:
    for instruction, change, why in reasons:
        if re.search(instruction, mutant.on.instruction) and re.search(change, mutant.on.how):
            return why
    return ""


def _substituted(
    run: Callable[[Emulated], bool], text: str | None, schedule: Schedule, arch: str
) -> tuple[bool, str]:
    """Result of ``run`` with ``text`` in place of its kernel's PTX; and the original PTX."""
    gpu = Gpu(
        EMULATED_CHIPS[arch], schedule=schedule, strict_tensor_fences=True, strict_scopes=True
    )
    device = Substitute(gpu)
    device.text = text
    shim.install(device, f"{arch}a")
    memory = Emulated(device.gpu, arch)
    try:
        return run(memory), device.given
    finally:
        memory.free()


@dataclass
class Warpgroups:
    """GEMM of sm_90, on a problem in which the ring wraps around more than once."""

    name: str = "GEMM, wgmma"
    text: str = ""

    def __post_init__(self) -> None:
        self.text = self._launch(None, EAGER)[1]
        fences = [n for n, line in enumerate(self.text.splitlines(), 1) if "wgmma.fence" in line]
        self._last = fences[-1]  # the fence of the tile that the unrolled loop leaves over

    def _launch(self, text: str | None, schedule: Schedule) -> tuple[bool, str]:
        from tests.test_emulator.kernels.warpgroup_gemm import right

        return _substituted(lambda memory: right(32, 1088, memory), text, schedule, "sm_90")

    def run(self, text: str, schedule: Schedule) -> bool:
        return self._launch(text, schedule)[0]

    def reason(self, mutant: Mutant) -> str:
        behind = re.match(r"wgmma\.wait_group|mbarrier\.arrive", mutant.on.instruction)
        last = behind and mutant.on.line > self._last
        return _LAST if last else _reason(_INITIALISED, mutant)


@dataclass
class Gemm:
    """GEMM on a problem in which every ring wraps around more than once."""

    name: str
    config: GemmConfig
    text: str = ""

    def __post_init__(self) -> None:
        from tests.test_emulator.kernels.problem import Problem

        config = self.config
        shape = Shape(4 * config.tile_m, 128, 768, config, "float32", config.ctas)
        self._problem = Problem(shape)
        self.text = self._launch(None, EAGER)[1]
        lines = self.text.splitlines()
        waits = [number for number, line in enumerate(lines, 1) if "mbarrier.try_wait" in line]
        self._tail = waits[1 : 1 + config.stages]  # the load warp's waits after its loop
        self._fenced = {
            *(n for n in waits if "tcgen05.fence::after" in "".join(lines[n : n + 8])),
            *(
                n
                for n, line in enumerate(lines, 1)
                if "mbarrier.arrive" in line
                and "tcgen05.fence::before" in "".join(lines[n - 11 : n - 1])
            ),
        }

    def _launch(self, text: str | None, schedule: Schedule) -> tuple[bool, str]:
        return _substituted(self._problem.run, text, schedule, "sm_100")

    def run(self, text: str, schedule: Schedule) -> bool:
        return self._launch(text, schedule)[0]

    def reason(self, mutant: Mutant) -> str:
        if mutant.on.how == "relaxed" and mutant.on.line in self._fenced:
            return _FENCED
        return _TAIL if mutant.on.line in self._tail else _reason(REASONS, mutant)


@dataclass
class Written:
    """Kernel written in PTX."""

    name: str
    check: Callable[[str, Schedule], None]
    text: str
    reasons: Reasons

    def run(self, text: str, schedule: Schedule) -> bool:
        try:
            self.check(text, schedule)
        except AssertionError:
            return False
        return True

    def reason(self, mutant: Mutant) -> str:
        return _reason(self.reasons, mutant)


def written_subjects() -> list[Written]:
    """Subjects that need only the emulator."""
    from tests.test_emulator.test_machine_hazards import KERNELS

    own = {
        "store": _STORE,
        "cluster": _CLUSTER,
        "neighbours": _NEIGHBOURS,
        "overlapped": _OVERLAPPED,
    }
    kernels = {**KERNELS, **written.KERNELS}
    return [
        Written(name, check, text, own.get(name, REASONS))
        for name, (check, text) in kernels.items()
    ]


def gemm_subject(two_sm: bool) -> Gemm:
    """GEMM of sm_100; making it installs the emulator's runtime and needs CuTe DSL."""
    shim.install(Gpu())
    config = GemmConfig(stages=2, two_sm=two_sm)
    return Gemm(f"GEMM, {config.ctas} SM", config)


def warpgroups_subject() -> Warpgroups:
    """GEMM of sm_90; making it installs the emulator's runtime and needs CuTe DSL."""
    shim.install(Gpu(), "sm_90a")
    return Warpgroups()


def subjects() -> Iterator[Subject]:
    """All subjects."""
    yield from written_subjects()
    yield warpgroups_subject()
    for two_sm in (False, True):
        yield gemm_subject(two_sm)
