"""Layout of rows for ``add_rms_norm``. No CuTe in here."""

from nvfp4_kernels.add_rms_norm.tile import MAX_K, MAX_STEPS, THREADS, VECTOR, WARP, NormTile
from nvfp4_kernels.checks import InvalidArgument


def choose_config(k: int) -> NormTile:
    """The layout for rows of ``k`` elements. Pure.

    Raises:
        InvalidArgument: the row is too long for one CTA's registers.
    """
    if k > MAX_K:
        raise InvalidArgument(
            f"x: K is {k}, must be at most {MAX_K} on sm_90; normalise longer rows with torch"
        )
    vectors = -(-k // VECTOR)
    steps = min(MAX_STEPS, -(-vectors // THREADS))
    threads = -(-vectors // steps)
    return NormTile(-(-threads // WARP) * WARP, steps)
