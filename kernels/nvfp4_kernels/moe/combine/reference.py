"""``moe_combine`` in torch: the reference, which is also the CPU kernel."""

import torch
from torch import Tensor


def moe_combine(
    y: Tensor, rows: Tensor, topk_weights: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """See ``nvfp4_kernels.moe.combine.op.moe_combine``."""
    m, k = rows.shape
    out = y.new_zeros((m, y.shape[2]), dtype=torch.float32)
    for slot in range(k):
        tokens = (rows[:, slot] >= 0).nonzero().squeeze(1)
        values = y.flatten(0, 1)[rows[tokens, slot].long()].float()
        if topk_weights is not None:
            values = values * topk_weights[tokens, slot].unsqueeze(1)
        out[tokens] += values
    return out.to(out_dtype)
