"""``quantize`` in torch: the formula, and the kernel on CPU."""

from torch import Tensor

from nvfp4_kernels.nvfp4 import quantize_activation, row_global_scales, to_blocked


def quantize(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """See ``nvfp4_kernels.quantize.op.quantize``."""
    data, scales = quantize_activation(x, global_scale)
    return data, to_blocked(scales)


def quantize_per_token(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See ``nvfp4_kernels.quantize.op.quantize_per_token``."""
    row_scale = row_global_scales(x)
    data, scales = quantize_activation(x, row_scale)
    return data, to_blocked(scales), row_scale
