"""Choice of the tile of ``add_rms_norm``. Imports no CuTe."""

from nvfp4_kernels.device.row_vectors.tile import THREADS, VECTOR, WARP, VectorTile
from nvfp4_kernels.norm.tile import MAX_K, MAX_STEPS


def choose_config(k: int) -> VectorTile:
    """Choose the tile for rows of ``k`` elements. Pure function."""
    assert k <= MAX_K, "one CTA's registers hold a row"
    vectors = -(-k // VECTOR)
    steps = min(MAX_STEPS, -(-vectors // THREADS))
    threads = -(-vectors // steps)
    return VectorTile(-(-threads // WARP) * WARP, steps)
