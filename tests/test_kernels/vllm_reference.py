"""vLLM's NVFP4 arithmetic, in this package's layout."""

import torch
from torch import Tensor
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import ref_nvfp4_quant

from tests.test_kernels.oracle import Float64


def quantize_with_vllm(x: Tensor, global_scale: Tensor) -> tuple[Float64, Tensor]:
    """Codes as float64 ``(..., rows, K)`` and linear block scales ``(..., rows, K/16)``.

    ``global_scale`` is a factor, ``()`` or one per row.
    """
    divisor = global_scale.reciprocal()
    if divisor.ndim:
        divisor = divisor.reshape(-1, 1, 1)
    values, scales = ref_nvfp4_quant(x.flatten(0, -2), divisor, 16)
    linear = scales.view(*x.shape[:-1], x.shape[-1] // 16).to(torch.float8_e4m3fn)
    return values.double().view(x.shape).numpy(), linear
