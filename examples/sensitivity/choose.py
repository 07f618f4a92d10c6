"""Choice of the groups to leave in 16 bits; pure functions."""

from collections.abc import Callable, Mapping, Sequence

from examples.sensitivity.budget import Budget
from examples.sensitivity.groups import BYTES_IN_16_BITS, Group, bits_per_weight


def check_budget(groups: Sequence[Group], budget: Budget) -> None:
    """Check a budget as far as is possible before any group is measured.

    Raises:
        ValueError: no group would be left to quantise, or none could stay in 16 bits.
    """
    if budget.max_ignored is not None and budget.max_ignored >= len(groups):
        raise ValueError(
            f"max_ignored: is {budget.max_ignored}, must be less than {len(groups)}, the layers "
            "there are; lower --max-ignored"
        )
    if budget.keep_bits is not None:
        least = min(bits_per_weight(groups, [group]) for group in groups)
        if not least <= budget.keep_bits < 8 * BYTES_IN_16_BITS:
            raise ValueError(
                f"keep_bits: is {budget.keep_bits:g}, must be from {least:.3f}, with one layer in "
                "16 bits, to less than 16; change --keep-bits"
            )


def most_sensitive(groups: Sequence[Group], kl: Mapping[str, float], count: int) -> list[Group]:
    """The ``count`` groups with the largest divergence."""
    return sorted(groups, key=lambda group: -kl[group.name])[:count]


def worth_their_bytes(groups: Sequence[Group], kl: Mapping[str, float]) -> list[Group]:
    """All groups, in descending order of the divergence that each extra byte wins back."""
    return sorted(groups, key=lambda group: -kl[group.name] / group.extra_bytes)


def within_bits(ranked: Sequence[Group], bits: float) -> list[Group]:
    """Groups chosen from ``ranked``, in order.

    A group is skipped if it would raise the mean bits per weight above ``bits``.
    """
    chosen: list[Group] = []
    for group in ranked:
        if bits_per_weight(ranked, [*chosen, group]) <= bits:
            chosen.append(group)
    return chosen


def fewest(count: int, is_enough: Callable[[int], bool]) -> int:
    """Smallest n from 1 to ``count`` for which ``is_enough(n)`` is True, by bisection.

    The predicate is assumed monotonic in n, and true of ``count``.
    """
    too_few, enough = 0, count
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if is_enough(middle):
            enough = middle
        else:
            too_few = middle
    return enough
