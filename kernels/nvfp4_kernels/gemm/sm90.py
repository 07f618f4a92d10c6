"""``gemm`` on sm_90: 16-bit activations, the weight decoded on its way to ``wgmma``."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nvfp4_kernels.fragments import Fragments
from nvfp4_kernels.sm90.product import product


def gemm(
    a: Tensor,
    a_scales: None,
    b: Tensor,
    b_scales: Tensor,
    alpha: Tensor,
    shard_sizes: Sequence[int],
    row_scale: None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """See ``nvfp4_kernels.gemm.op.gemm``; the weight is in fragments."""
    rows, n = a.flatten(0, -2), sum(shard_sizes)
    weights = [Fragments(b, b_scales)]
    out = product(rows, weights, alpha, shard_sizes, n, bias, out_dtype)
    return out.view(*a.shape[:-1], n)
