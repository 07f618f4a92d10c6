"""Script of a launch: the data about its kernel that the replays of all clusters share."""

from collections import Counter
from dataclasses import dataclass, field

from tests.emulator.codegen import Program
from tests.emulator.machine.trace import Key
from tests.emulator.timing.segments import Segment


@dataclass(frozen=True)
class Script:
    """Data about a kernel that the replays of all clusters of a launch share.

    Attributes:
        program: the kernel.
        segments: segments of each basic block.
        expected: number of arrivals that complete a phase, by mbarrier.
        meetings: number of warps that arrive in each generation of a CTA or cluster barrier.
        owners: position of the CTA that waits on an mbarrier.
        polls: PTX lines of waits that do not block.
        cached: PTX lines of loads that L1 may answer.
        names: names of PTX lines, for timelines; filled on demand.
    """

    program: Program
    segments: list[list[Segment]]
    expected: dict[Key, int]
    meetings: Counter[tuple[str, Key, int]]
    owners: dict[Key, tuple[int, int, int]]
    polls: frozenset[int]
    cached: frozenset[int]
    names: dict[int, str] = field(default_factory=dict)
