"""``merge_segments`` in torch: the reference, which is also the CPU kernel."""

import torch
from torch import Tensor


def merge_segments(
    outs: Tensor, lses: Tensor, sinks: Tensor | None, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See ``nvfp4_kernels.attention.merge.op.merge_segments``."""
    lses = lses.masked_fill(lses == torch.inf, -torch.inf)
    row_max = lses.amax(0)
    if sinks is not None:
        row_max = row_max.maximum(sinks)
    # Finite without any key, so that its distance to −inf is no NaN.
    row_max = row_max.clamp_min(torch.finfo(torch.float32).min)
    weights = (lses - row_max).exp()
    row_sum = weights.sum(0)
    if sinks is not None:
        row_sum = row_sum + (sinks - row_max).exp()
    outs = outs.float().masked_fill((lses == -torch.inf).unsqueeze(-1), 0)
    out = (weights.unsqueeze(-1) * outs).sum(0) / row_sum.where(row_sum != 0, 1).unsqueeze(-1)
    return out.to(out_dtype), row_max + row_sum.log()
