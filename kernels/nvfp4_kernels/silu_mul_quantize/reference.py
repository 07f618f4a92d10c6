"""``silu_mul_quantize`` in torch: the formula, and the kernel on CPU."""

import torch
from torch import Tensor

from nvfp4_kernels.nvfp4 import quantize_activation, row_global_scales, to_blocked


def silu_mul_quantize(gate_up: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """See ``nvfp4_kernels.silu_mul_quantize.op.silu_mul_quantize``."""
    data, scales = quantize_activation(silu_mul(gate_up), global_scale)
    return data, to_blocked(scales)


def silu_mul_quantize_per_token(gate_up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See ``nvfp4_kernels.silu_mul_quantize.op.silu_mul_quantize_per_token``."""
    product = silu_mul(gate_up)
    row_scale = row_global_scales(product)
    data, scales = quantize_activation(product, row_scale)
    return data, to_blocked(scales), row_scale


def silu_mul(gate_up: Tensor) -> Tensor:
    """Rounded after either operation, as vLLM's ``SiluAndMul.forward_native``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
