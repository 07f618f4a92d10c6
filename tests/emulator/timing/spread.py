"""Representative sample of a sequence."""

from itertools import pairwise
from random import Random


def spread(count: int, some: int) -> list[int]:
    """``some`` of the numbers below ``count``: one at random from each run of ``count / some``.

    The choice is random so that a property that recurs every few numbers keeps its frequency.
    """
    draw = Random(0)
    ends = [number * count // some for number in range(some + 1)]
    return [draw.randrange(*span) for span in pairwise(ends)]
