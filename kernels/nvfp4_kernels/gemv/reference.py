"""``gemv`` in torch: the formula, and the kernel on CPU."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nvfp4_kernels.fragments import blocked_weight
from nvfp4_kernels.nvfp4 import block_scaled_product


def gemv(
    a: Tensor,
    a_scales: Tensor | None,
    b: Tensor,
    b_scales: Tensor,
    alpha: Tensor,
    shard_sizes: Sequence[int],
    row_scale: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """See ``nvfp4_kernels.gemv.op.gemv``."""
    b, b_scales = blocked_weight(b, b_scales, sum(shard_sizes), a.shape[-1])
    accumulator = block_scaled_product(a, a_scales, b, b_scales)
    sizes = torch.tensor(list(shard_sizes), device=alpha.device)
    out = accumulator.mul_(alpha.repeat_interleave(sizes))
    if row_scale is not None:
        out.mul_(row_scale.unsqueeze(-1))
    if bias is not None:
        out.add_(bias.float())
    return out.to(out_dtype)
