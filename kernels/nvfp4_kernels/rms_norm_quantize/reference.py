"""``rms_norm_quantize`` in torch: the formula, and the kernel on CPU.

Roundings are those of ``add_rms_norm``, with a residual or without one.
"""

from torch import Tensor

from nvfp4_kernels.add_rms_norm.reference import add_rms_norm, rms_norm
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
    norm, total = add_rms_norm(x, residual, weight, eps)
    return (*_quantize(norm, global_scale), total)


def add_rms_norm_quantize_per_token(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See ``nvfp4_kernels.rms_norm_quantize.op.add_rms_norm_quantize_per_token``."""
    norm, total = add_rms_norm(x, residual, weight, eps)
    return (*_quantize_per_token(norm), total)


def _quantize(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    data, scales = quantize_activation(x, global_scale)
    return data, to_blocked(scales)


def _quantize_per_token(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    row_scale = row_global_scales(x)
    return (*_quantize(x, row_scale), row_scale)
