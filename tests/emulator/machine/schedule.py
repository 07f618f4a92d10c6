"""Legal order of a run: who goes on next, and when asynchronous work completes."""

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """One legal order of everything the hardware leaves open.

    Attributes:
        name: how reports call it.
        warps: "in_order" lets a warp run until it waits; "random" changes warps at synchronisation
            points too, and picks the next one, its CTA and its cluster at random.
        copies: bulk and cp.async copies complete "eager" (at issue), "late" (when nothing else can
        go
            on) or "random"ly in between, in any order their ordering rules allow.
        tensor: the same for the tensor core's instructions.
        seed: of the random choices.
    """

    name: str
    warps: str = "in_order"
    copies: str = "eager"
    tensor: str = "eager"
    seed: int = 0

    def __str__(self) -> str:
        return self.name

    def random(self) -> random.Random:
        return random.Random(self.seed)


EAGER = Schedule("eager")
COPIES_LATE = Schedule("copies late", copies="late")
TENSOR_LATE = Schedule("tensor late", tensor="late")
ALL_LATE = Schedule("all late", copies="late", tensor="late")


def randomised(seed: int) -> Schedule:
    return Schedule(f"random {seed}", "random", "random", "random", seed)


STANDARD = (EAGER, COPIES_LATE, TENSOR_LATE, ALL_LATE, randomised(1), randomised(2))
