"""``gemv`` on sm_100: tokens are the tensor core's N side."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nvfp4_kernels.sm100.product import product


def gemv(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    alpha: Tensor,
    shard_sizes: Sequence[int],
    row_scale: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """See ``nvfp4_kernels.gemv.op.gemv``."""
    weights = [(b, b_scales)]
    out, _ = product((a, a_scales), weights, alpha, shard_sizes, row_scale, bias, out_dtype)
    return out
