"""``silu_mul_gemm`` in torch: the formula, and the kernel on CPU."""

from functools import partial

import torch
from torch import Tensor

from nvfp4_kernels.each_row import by_row
from nvfp4_kernels.formats.fragments import blocked_weight
from nvfp4_kernels.formats.nvfp4 import product_with_weight
from nvfp4_kernels.formats.terms import decode_terms, quantize_terms


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
    *,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """See ``nvfp4_kernels.gemm.silu_mul.op``; the second result is None for 16-bit output.

    ``batch_invariant``: each row is computed by itself.
    """
    k = a.shape[-1]
    values = a.float() if a_scales is None else decode_terms(a, a_scales, terms)
    weights = (blocked_weight(b1, b1_scales, n, k), blocked_weight(b2, b2_scales, n, k))
    gate, up = (
        product_with_weight(values, *weight, batch_invariant).mul_(factor)
        for weight, factor in zip(weights, alpha, strict=True)
    )
    if row_scale is not None:
        gate.mul_(row_scale.unsqueeze(-1))
        up.mul_(row_scale.unsqueeze(-1))
    silu = torch.nn.functional.silu
    out = (by_row(silu, gate) if batch_invariant else silu(gate)).mul_(up)
    if out_global_scale is None:
        return out.to(out_dtype), None
    return quantize_terms(out, out_global_scale, out_terms)


silu_mul_gemm_batch_invariant = partial(silu_mul_gemm, batch_invariant=True)
