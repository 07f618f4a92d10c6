"""Over how many CTAs and warps the keys of a sequence are spread. Pure, and no CuTe."""

from nvfp4_kernels.sm90.attention.tile import KEYS, MAX_SPLITS, WARPS, DecodeTile
from nvfp4_kernels.sm90.choose import SMS

FEW_WARPS, MANY_WARPS = WARPS
MANY_WARPS_HEAD_DIM = 128  # at most: with more, a warp has no memory for a ring


def choose_config(
    batch: int, kv_heads: int, group: int, head_dim: int, most: int, sms: int = SMS
) -> DecodeTile:
    """As many splits as let all CTAs be there at once, each of whose warps has keys.

    Many warps where each CTA has an SM to itself all the same.

    Args:
        batch: sequences.
        kv_heads: KV heads.
        group: query heads of each.
        head_dim: D.
        most: keys that a token can see: those that a row of the block table holds, or the window.
        sms: of the device.
    """
    splits, clusters = 1, batch * kv_heads
    resident = DecodeTile(head_dim, group).resident
    while (
        splits < MAX_SPLITS
        and 2 * splits * clusters <= resident * sms
        and splits * FEW_WARPS * KEYS < most
    ):
        splits *= 2
    many = (
        head_dim <= MANY_WARPS_HEAD_DIM
        and splits * clusters <= sms
        and splits * FEW_WARPS * KEYS < most
    )
    return DecodeTile(head_dim, group, splits, MANY_WARPS if many else FEW_WARPS)
