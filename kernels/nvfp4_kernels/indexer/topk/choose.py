"""Choice of the number of CTAs that share a row of scores, and of threads. Imports no CuTe."""

from nvfp4_kernels.indexer.topk.tile import MAX_CLUSTER, MAX_SLICE, TopkTile, bitmap_words
from nvfp4_kernels.sm90.limits import CTA_RESERVED_BYTES, SM_SHARED_BYTES  # sm_100 has as much


def choose_config(rows: int, columns: int, top_k: int, sms: int) -> TopkTile:
    """Tile whose clusters, of up to 8 CTAs, fill the SMs; a long row needs a larger cluster.

    Args:
        rows: number of rows of the launch.
        columns: length of the longest row, up to ``MAX_COLUMNS``.
        top_k: number of columns to select from each row, up to ``MAX_TOP_K``.
        sms: number of SMs of the GPU.
    """
    capacity = 8192 if top_k <= 2048 else 10240
    cluster = 1
    while cluster < MAX_CLUSTER and (2 * cluster * rows <= sms or columns > cluster * MAX_SLICE):
        cluster *= 2
    if rows * cluster > sms:
        # With two CTAs per SM, one can read while the other selects.
        half = TopkTile(512, cluster, capacity, bitmap_words(columns, cluster, 512))
        if 2 * (half.shared_bytes + CTA_RESERVED_BYTES) <= SM_SHARED_BYTES:
            return half
    return TopkTile(1024, cluster, capacity, bitmap_words(columns, cluster, 1024))
