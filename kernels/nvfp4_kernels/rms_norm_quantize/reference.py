"""``rms_norm_quantize`` in torch: the formula, and the kernel on CPU.

Roundings are those of vLLM 0.32, ``ir.ops.rms_norm`` and ``ir.ops.fused_add_rms_norm``, which
``RMSNorm.forward_native`` calls: the float32 sum is what is normalised, while its rounded form is
the new residual; the normalised value is rounded to the weight's dtype before it meets the weight,
and to the input's dtype after.
"""

import torch
from torch import Tensor

from nvfp4_kernels.nvfp4 import quantize_activation, row_global_scales, to_blocked


def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, global_scale: Tensor
) -> tuple[Tensor, Tensor]:
    """See ``nvfp4_kernels.rms_norm_quantize.op.rms_norm_quantize``."""
    return _quantize(rms_norm(x.float(), weight, eps, x.dtype), global_scale)


def rms_norm_quantize_per_token(
    x: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``nvfp4_kernels.rms_norm_quantize.op.rms_norm_quantize_per_token``."""
    return _quantize_per_token(rms_norm(x.float(), weight, eps, x.dtype))


def add_rms_norm_quantize(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, global_scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``nvfp4_kernels.rms_norm_quantize.op.add_rms_norm_quantize``."""
    total = x.float() + residual.float()
    return (*_quantize(rms_norm(total, weight, eps, x.dtype), global_scale), total.to(x.dtype))


def add_rms_norm_quantize_per_token(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See ``nvfp4_kernels.rms_norm_quantize.op.add_rms_norm_quantize_per_token``."""
    total = x.float() + residual.float()
    return (*_quantize_per_token(rms_norm(total, weight, eps, x.dtype)), total.to(x.dtype))


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """``x`` float32, normalised: of ``dtype``."""
    inverse = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    return ((x * inverse).to(weight.dtype) * weight).to(dtype)


def _quantize(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    data, scales = quantize_activation(x, global_scale)
    return data, to_blocked(scales)


def _quantize_per_token(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    row_scale = row_global_scales(x)
    return (*_quantize(x, row_scale), row_scale)
