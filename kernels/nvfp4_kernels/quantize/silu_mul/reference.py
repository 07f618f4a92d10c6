"""``silu_mul_quantize`` in torch: the formula, and the kernel on CPU."""

import torch
from torch import Tensor

from nvfp4_kernels.formats.nvfp4 import row_global_scales
from nvfp4_kernels.formats.terms import quantize_terms


def silu_mul_quantize(
    gate_up: Tensor, global_scale: Tensor, terms: int = 1
) -> tuple[Tensor, Tensor]:
    """See ``nvfp4_kernels.quantize.silu_mul.op.silu_mul_quantize``."""
    return quantize_terms(silu_mul(gate_up), global_scale, terms)


def silu_mul_quantize_per_token(gate_up: Tensor, terms: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """See ``nvfp4_kernels.quantize.silu_mul.op.silu_mul_quantize_per_token``."""
    product = silu_mul(gate_up)
    row_scale = row_global_scales(product)
    return (*quantize_terms(product, row_scale, terms), row_scale)


def silu_mul(gate_up: Tensor) -> Tensor:
    """SiLU-mul, rounded after each operation, as vLLM's ``SiluAndMul.forward_native``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
