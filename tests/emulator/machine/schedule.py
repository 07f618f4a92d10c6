"""Schedule of a run: which warp runs next, and when asynchronous work completes."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Schedule:
    """One legal order of everything the hardware leaves open.

    Attributes:
        name: name in reports.
        warps: "in_order" lets a warp run until it waits; "random" also switches warps at
            synchronisation points, and picks the next warp, its CTA and its cluster at random.
        copies: bulk and cp.async copies complete "eager" (at issue), "late" (when nothing else can
            run) or "random"ly in between, in any order that the ordering rules allow.
        tensor: the same for the tensor core's instructions.
        seed: seed of the random choices.
        late_cta: rank of the CTA of each cluster that starts only once nothing else can run,
            counted from the last if negative; None for no late CTA.
        starved: whether one warp of each cluster, picked at random, runs only when no other can.
        successor_first: whether the later of overlapping launches run as long as they can;
            otherwise the earlier launches do. Random if ``warps`` is "random".
    """

    name: str
    warps: str = "in_order"
    copies: str = "eager"
    tensor: str = "eager"
    seed: int = 0
    late_cta: int | None = None
    starved: bool = False
    successor_first: bool = False

    def __str__(self) -> str:
        return self.name

    def starved_of(self, warps: Sequence[T]) -> T | None:
        """The starved warp of a cluster, which waits for all other warps, or None."""
        return self.random().choice(warps) if self.starved else None

    def random(self) -> random.Random:
        return random.Random(self.seed)


EAGER = Schedule("eager")
COPIES_LATE = Schedule("copies late", copies="late", late_cta=0, successor_first=True)
TENSOR_LATE = Schedule("tensor late", tensor="late", late_cta=-1, successor_first=True)
ALL_LATE = Schedule("all late", copies="late", tensor="late")


def randomised(seed: int) -> Schedule:
    starved = seed % 2 == 0
    return Schedule(f"random {seed}", "random", "random", "random", seed, starved=starved)


STANDARD = (EAGER, COPIES_LATE, TENSOR_LATE, ALL_LATE, randomised(1), randomised(2))
