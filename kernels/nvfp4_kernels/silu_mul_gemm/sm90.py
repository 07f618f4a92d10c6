"""``silu_mul_gemm`` on sm_90: 16-bit activations, weights decoded on their way to ``wgmma``."""

import torch
from torch import Tensor

from nvfp4_kernels.fragments import Fragments
from nvfp4_kernels.sm90.product import product


def silu_mul_gemm(
    a: Tensor,
    a_scales: None,
    b1: Tensor,
    b1_scales: Tensor,
    b2: Tensor,
    b2_scales: Tensor,
    alpha: Tensor,
    row_scale: None,
    n: int,
    out_global_scale: None,
    out_dtype: torch.dtype,
) -> tuple[Tensor, None]:
    """See ``nvfp4_kernels.silu_mul_gemm.op``; the weights are in fragments."""
    rows = a.flatten(0, -2)
    weights = [Fragments(b1, b1_scales), Fragments(b2, b2_scales)]
    out = product(rows, weights, alpha, [n], n, None, out_dtype)
    return out.view(*a.shape[:-1], n), None
