"""Over how many CTAs the keys of a sequence are spread. Pure, and no CuTe."""

from nvfp4_kernels.sm90.attention.tile import KEYS, MAX_SPLITS, WARPS, DecodeTile
from nvfp4_kernels.sm90.choose import SMS


def choose_config(
    batch: int, kv_heads: int, group: int, head_dim: int, most: int, sms: int = SMS
) -> DecodeTile:
    """As many splits as let all CTAs be there at once, each of whose warps has keys.

    Args:
        batch: sequences.
        kv_heads: KV heads.
        group: query heads of each.
        head_dim: D.
        most: keys that a token can see: those that a row of the block table holds, or the window.
        sms: of the device.
    """
    splits = 1
    resident = DecodeTile(head_dim, group).resident
    while (
        splits < MAX_SPLITS
        and 2 * splits * batch * kv_heads <= resident * sms
        and splits * WARPS * KEYS < most
    ):
        splits *= 2
    return DecodeTile(head_dim, group, splits)
