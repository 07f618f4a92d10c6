"""A part of many that stands for all of them."""

from itertools import pairwise
from random import Random


def spread(count: int, some: int) -> list[int]:
    """``some`` of ``count`` numbers, one at random of every ``count / some`` in a row.

    At random, so that what comes back every few numbers is met as often as it is among all of them.
    """
    draw = Random(0)
    ends = [number * count // some for number in range(some + 1)]
    return [draw.randrange(*span) for span in pairwise(ends)]
