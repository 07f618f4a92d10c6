"""``silu_mul_gemm`` in torch: the formula, and the kernel on CPU."""

import torch
from torch import Tensor

from nvfp4_kernels.fragments import blocked_weight
from nvfp4_kernels.nvfp4 import product_with_weight
from nvfp4_kernels.terms import decode_terms, quantize_terms


def silu_mul_gemm(
    a: Tensor,
    a_scales: Tensor | None,
    b1: Tensor,
    b1_scales: Tensor,
    b2: Tensor,
    b2_scales: Tensor,
    alpha: Tensor,
    row_scale: Tensor | None,
    n: int,
    out_global_scale: Tensor | None,
    out_dtype: torch.dtype,
    terms: int = 1,
    out_terms: int = 1,
) -> tuple[Tensor, Tensor | None]:
    """See ``nvfp4_kernels.silu_mul_gemm.op``; the second result is None for 16-bit output."""
    k = a.shape[-1]
    values = a.float() if a_scales is None else decode_terms(a, a_scales, terms)
    gate = product_with_weight(values, *blocked_weight(b1, b1_scales, n, k)).mul_(alpha[0])
    up = product_with_weight(values, *blocked_weight(b2, b2_scales, n, k)).mul_(alpha[1])
    if row_scale is not None:
        gate.mul_(row_scale.unsqueeze(-1))
        up.mul_(row_scale.unsqueeze(-1))
    out = torch.nn.functional.silu(gate).mul_(up)
    if out_global_scale is None:
        return out.to(out_dtype), None
    return quantize_terms(out, out_global_scale, out_terms)
