"""``silu_mul_gemm`` on sm_100: both products in one pass over the activations."""

import torch
from torch import Tensor

from nvfp4_kernels.sm100.product import product


def silu_mul_gemm(
    a: Tensor,
    a_scales: Tensor,
    b1: Tensor,
    b1_scales: Tensor,
    b2: Tensor,
    b2_scales: Tensor,
    alpha: Tensor,
    row_scale: Tensor | None,
    n: int,
    out_global_scale: Tensor | None,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None]:
    """See ``nvfp4_kernels.silu_mul_gemm.op``; the second result is None for 16-bit output."""
    weights = [(b1, b1_scales), (b2, b2_scales)]
    return product((a, a_scales), weights, alpha, [n], row_scale, None, out_dtype, out_global_scale)
