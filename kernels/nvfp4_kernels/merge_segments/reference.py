"""``merge_segments`` in torch: the formula, and the kernel on CPU."""

import torch
from torch import Tensor


def merge_segments(
    outs: Tensor, lses: Tensor, sinks: Tensor | None, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See ``nvfp4_kernels.merge_segments.op.merge_segments``."""
    lses = lses.masked_fill(lses == torch.inf, -torch.inf)
    largest = lses.amax(0)
    if sinks is not None:
        largest = largest.maximum(sinks)
    # Without any key: finite, so that its distance to −inf is no NaN.
    largest = largest.clamp_min(torch.finfo(torch.float32).min)
    weights = (lses - largest).exp()
    total = weights.sum(0)
    if sinks is not None:
        total = total + (sinks - largest).exp()
    found = outs.float().masked_fill((lses == -torch.inf).unsqueeze(-1), 0)
    out = (weights.unsqueeze(-1) * found).sum(0) / total.where(total != 0, 1).unsqueeze(-1)
    return out.to(out_dtype), largest + total.log()
