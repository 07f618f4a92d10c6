"""How many CTAs share a row of scores, and how many threads each has. No CuTe in here."""

from nvfp4_kernels.indexer.topk.tile import MAX_CLUSTER, MAX_SLICE, Config, words_of
from nvfp4_kernels.sm90.limits import CTA_RESERVED_BYTES, SM_SHARED_BYTES  # sm_100 has as much


def choose_config(rows: int, columns: int, top_k: int, sms: int) -> Config:
    """As many CTAs per row as keep all SMs busy.

    Args:
        rows: of the launch.
        columns: of the longest row, up to ``MAX_COLUMNS``.
        top_k: wanted of each row, up to ``MAX_TOP_K``.
        sms: of the GPU.
    """
    buffer = 8192 if top_k <= 2048 else 10240
    cluster = 1
    while cluster < MAX_CLUSTER and (2 * cluster * rows <= sms or columns > cluster * MAX_SLICE):
        cluster *= 2
    if rows * cluster > sms:
        # Two CTAs of an SM take turns at reading and selecting.
        half = Config(512, cluster, buffer, words_of(columns, cluster, 512))
        if 2 * (half.shared_bytes + CTA_RESERVED_BYTES) <= SM_SHARED_BYTES:
            return half
    return Config(1024, cluster, buffer, words_of(columns, cluster, 1024))
