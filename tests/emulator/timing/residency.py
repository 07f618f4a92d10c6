"""Number of clusters that the GPCs of a chip hold at once."""

from tests.emulator.timing.errors import TimingError


def clusters_at_once(gpcs: tuple[int, ...], size: int) -> int:
    """Number of clusters of ``size`` CTAs that the GPCs hold, with one CTA on each SM.

    Raises:
        TimingError: no GPC holds a cluster.
    """
    count = sum(sms // size for sms in gpcs)
    if not count:
        raise TimingError(
            f"cluster: {size} CTAs, a GPC has {max(gpcs)} SMs and must hold all of them; "
            "launch smaller clusters"
        )
    return count
