"""``silu_mul_quantize`` in torch: the reference, which is also the CPU kernel."""

import torch
from torch import Tensor

from nvfp4_kernels.quantize.call import SiluMulQuantizeCall
from nvfp4_kernels.quantize.reference import quantize_rows


def silu_mul_quantize(call: SiluMulQuantizeCall) -> tuple[Tensor, ...]:
    """See ``nvfp4_kernels.quantize.silu_mul.op.silu_mul_quantize``."""
    return quantize_rows(silu_mul(call.gate_up), call.output)


def silu_mul(gate_up: Tensor) -> Tensor:
    """SiLU-mul, rounded after each operation, as vLLM's ``SiluAndMul.forward_native``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
