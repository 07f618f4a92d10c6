"""Choice of the tile of ``add_rms_norm``. Imports no CuTe."""

from nvfp4_kernels.norm.tile import MAX_K, MAX_STEPS, THREADS, VECTOR, WARP, NormTile


def choose_config(k: int) -> NormTile:
    """Choose the tile for rows of ``k`` elements. Pure function."""
    assert k <= MAX_K, "one CTA's registers hold a row"
    vectors = -(-k // VECTOR)
    steps = min(MAX_STEPS, -(-vectors // THREADS))
    threads = -(-vectors // steps)
    return NormTile(-(-threads // WARP) * WARP, steps)
