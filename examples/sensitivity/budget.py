"""Budget of the list of layers to leave in 16 bits."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """Budget of the list; exactly one attribute is not None.

    Attributes:
        win_back: share of the quantised model's divergence that the list must win back, 0 to 1.
        max_ignored: number of layers on the list.
        keep_bits: mean bits per weight that the quantised model may take.
    """

    win_back: float | None = None
    max_ignored: int | None = None
    keep_bits: float | None = None


def make_budget(
    win_back: float | None, max_ignored: int | None, keep_bits: float | None, default: float
) -> Budget:
    """Budget as requested; without a request, ``default`` is the share to win back.

    Raises:
        ValueError: more than one budget is requested, or ``win_back`` or ``max_ignored`` is out of
            range; ``check_budget`` checks the rest.
    """
    given = {"win_back": win_back, "max_ignored": max_ignored, "keep_bits": keep_bits}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise ValueError(f"{', '.join(named)}: exclude one another; give one of them")
    if not named:
        return Budget(win_back=default)
    if win_back is not None and not 0 < win_back < 1:
        raise ValueError(f"win_back: is {win_back:g}, must lie between 0 and 1; change --win-back")
    if max_ignored is not None and max_ignored < 1:
        raise ValueError(f"max_ignored: is {max_ignored}, must be at least 1; raise --max-ignored")
    return Budget(win_back, max_ignored, keep_bits)
