"""Clusters that the GPCs of a chip hold at once."""

from tests.emulator.timing.errors import TimingError


def clusters_at_once(gpcs: tuple[int, ...], size: int) -> int:
    """Clusters of ``size`` CTAs that GPCs of the given sizes hold, with a CTA on each SM.

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
