"""Which groups to leave in 16 bits; pure."""

from collections.abc import Callable, Mapping, Sequence

from examples.sensitivity.groups import Group, bits_per_weight


def most_sensitive(groups: Sequence[Group], kl: Mapping[str, float], count: int) -> list[Group]:
    """The ``count`` groups with the largest divergence.

    Raises:
        ValueError: there are not that many, or none would be left to quantise.
    """
    if count >= len(groups):
        raise ValueError(
            f"max_ignored: is {count}, must be less than {len(groups)}, the layers there are; "
            "lower --max-ignored"
        )
    return sorted(groups, key=lambda group: -kl[group.name])[:count]


def worth_their_bytes(groups: Sequence[Group], kl: Mapping[str, float]) -> list[Group]:
    """All groups, those first that win the most divergence for each byte they take more."""
    return sorted(groups, key=lambda group: -kl[group.name] / group.extra_bytes)


def within_bits(ranked: Sequence[Group], bits: float) -> list[Group]:
    """As many of ``ranked`` as fit, in order, where weights may take ``bits`` in the mean.

    Raises:
        ValueError: not even the smallest group fits, or all would.
    """
    chosen: list[Group] = []
    for group in ranked:
        if bits_per_weight(ranked, [*chosen, group]) <= bits:
            chosen.append(group)
    if not chosen or len(chosen) == len(ranked):
        least = min(bits_per_weight(ranked, [group]) for group in ranked)
        raise ValueError(
            f"keep_bits: is {bits:g}, must be from {least:.3f}, with one layer in 16 bits, to "
            "less than 16; change --keep-bits"
        )
    return chosen


def fewest(count: int, is_enough: Callable[[int], bool]) -> int:
    """The smallest n from 1 to ``count`` that is enough, found by bisection.

    What is enough is taken to stay so when n grows; ``count`` is taken to be enough.
    """
    too_few, enough = 0, count
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if is_enough(middle):
            enough = middle
        else:
            too_few = middle
    return enough
