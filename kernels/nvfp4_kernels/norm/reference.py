"""``add_rms_norm`` in torch: the reference, which is also the CPU kernel.

Roundings as in vLLM 0.32's ``ir.ops.fused_add_rms_norm``: the float32 sum is normalised, the
rounded sum is the new residual; the normalised value is rounded to the weight's dtype, multiplied
by the weight, and the product rounded to the input's dtype.
"""

import torch
from torch import Tensor

from nvfp4_kernels.norm.call import AddRmsNormCall


def add_rms_norm(call: AddRmsNormCall) -> tuple[Tensor, Tensor]:
    """See ``nvfp4_kernels.norm.op.add_rms_norm``."""
    x, residual, weight, eps = call
    total = x.float() + residual.float()
    return rms_norm(total, weight, eps, x.dtype), total.to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """RMSNorm of float32 ``x`` with a weight; the result is rounded to ``dtype``."""
    inverse = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    return ((x * inverse).to(weight.dtype) * weight).to(dtype)
