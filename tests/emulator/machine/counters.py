"""Counters of a launch: instructions by family and warp, bytes by path, MMAs by shape."""

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.emulator.codegen import Program


class Counters:
    """Counts of one launch.

    Attributes:
        instructions: number of warp instructions issued, by warp index and family.
        nbytes: number of bytes by path: "global read", "global write", "copy global to shared", ...
            The "HBM" paths count each byte once: the traffic that a perfect L2 would leave.
        multiplies: number of tensor core instructions by (kind, M, N, K, CTAs).
        waits: number of waits by warps, by kind of barrier.
        neighbours: by index of a launch in the chain, the number of its CTAs that were resident on
            an SM when a CTA of this launch started there.
    """

    def __init__(self, program: "Program") -> None:
        self._program = program
        self._blocks: dict[int, list[int]] = {}  # warp -> executions of each basic block
        self.nbytes: Counter[str] = Counter()
        self.multiplies: Counter[tuple[str, int, int, int, int]] = Counter()
        self.waits: Counter[str] = Counter()
        self.neighbours: Counter[int] = Counter()

    @property
    def instructions(self) -> Counter[tuple[int, str]]:
        found: Counter[tuple[int, str]] = Counter()
        for warp, blocks_run in self._blocks.items():
            for families, times in zip(self._program.block_families, blocks_run, strict=True):
                if times:
                    for family, count in families.items():
                        found[warp, family] += count * times
        return found

    @property
    def l2_hits(self) -> float:
        """Fraction of the bytes read from global memory that a perfect L2 would serve."""
        paths = ("global read", "copy global to shared", "cp.async")
        total = sum(self.nbytes[path] for path in paths)
        return 1 - self.nbytes["HBM read, each byte once"] / total if total else 0.0

    def add_blocks(self, warp: int, blocks_run: list[int]) -> None:
        """Add the number of times that a finished warp executed each basic block."""
        before = self._blocks.get(warp)
        if before is not None:
            blocks_run = [a + b for a, b in zip(before, blocks_run, strict=True)]
        self._blocks[warp] = blocks_run
