"""Choice of the number of splits and of the keys per step. Pure functions; imports no CuTe.

The rules were tuned on an H200 with 128 to 32768 keys, 1 to 64 sequences, 2 and 8 KV heads.
"""

from nvfp4_kernels.attention.decode.sm90.tile import KEYS, MAX_SPLITS, WARPS, DecodeTile
from nvfp4_kernels.sm90.limits import SMS

LONG_STEP = 2 * KEYS
LONG_STEP_HEAD_DIM = 128  # maximum: with more, shared memory holds no ring of long steps


def choose_config(
    batch: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    max_keys: int,
    sms: int = SMS,
    *,
    fp8: bool = False,
) -> DecodeTile:
    """Choose the tile: splits double while every CTA has an SM and a warp has several steps.

    A step has 32 keys if D is at most 128 and, without splits, no SM has more than one CTA, so that
    loads in flight and independent work are scarce. Otherwise a step has 16 keys.

    Args:
        batch: number of sequences.
        kv_heads: number of KV heads.
        group: number of query heads per KV head.
        head_dim: D.
        max_keys: upper bound on a token's keys: capacity of a block-table row, or the window.
        sms: number of SMs of the device.
        fp8: whether the cache is E4M3; the rules were tuned with 16-bit caches.
    """
    clusters = batch * kv_heads
    keys = LONG_STEP if head_dim <= LONG_STEP_HEAD_DIM and clusters <= sms else KEYS
    splits = 1
    while (
        splits < MAX_SPLITS
        and 2 * splits * clusters <= _reachable(2 * splits, sms)
        and splits * WARPS * keys < max_keys
    ):
        splits *= 2
    return DecodeTile(head_dim, group, splits, keys, fp8=fp8)


def _reachable(splits: int, sms: int) -> int:
    """Number of SMs that clusters of ``splits`` CTAs can fill: a cluster lies within one GPC."""
    return sms if splits <= 2 else sms // 2
