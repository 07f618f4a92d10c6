"""Over how many CTAs the keys of a sequence are spread, and in what steps. Pure, and no CuTe.

Measured on an H200 at 128 to 32768 keys, with 1 to 64 sequences of 2 and of 8 KV heads.
"""

from nvfp4_kernels.decode_attention.sm90.tile import KEYS, MAX_SPLITS, WARPS, DecodeTile
from nvfp4_kernels.sm90.limits import SMS

LONG_STEP = 2 * KEYS
LONG_STEP_HEAD_DIM = 128  # at most: with more, a warp has no memory for a ring


def choose_config(
    batch: int, kv_heads: int, group: int, head_dim: int, most: int, sms: int = SMS
) -> DecodeTile:
    """As many splits as find SMs of their own at once, each of whose warps has keys.

    Steps are long where SMs have one CTA: bytes on their way, and independent work, are scarce
    there. Where there are more CTAs than SMs, two share one.

    Args:
        batch: sequences.
        kv_heads: KV heads.
        group: query heads of each.
        head_dim: D.
        most: keys that a token can see: those that a row of the block table holds, or the window.
        sms: of the device.
    """
    clusters = batch * kv_heads
    keys = LONG_STEP if head_dim <= LONG_STEP_HEAD_DIM and clusters <= sms else KEYS
    splits = 1
    while (
        splits < MAX_SPLITS
        and 2 * splits * clusters <= _reachable(2 * splits, sms)
        and splits * WARPS * keys < most
    ):
        splits *= 2
    return DecodeTile(head_dim, group, splits, keys)


def _reachable(splits: int, sms: int) -> int:
    """SMs that clusters of so many CTAs fill at once: they lie within a GPC, and leave gaps."""
    return sms if splits <= 2 else sms // 2
