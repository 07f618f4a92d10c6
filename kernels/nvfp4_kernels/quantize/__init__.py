"""Quantisation of activations to NVFP4 with blocked scales, also after SiLU-mul or RMSNorm."""

from nvfp4_kernels.quantize.op import quantize, quantize_per_token
from nvfp4_kernels.quantize.rms_norm.op import (
    add_rms_norm_quantize,
    add_rms_norm_quantize_per_token,
    rms_norm_quantize,
    rms_norm_quantize_per_token,
)
from nvfp4_kernels.quantize.silu_mul.op import silu_mul_quantize, silu_mul_quantize_per_token

__all__ = [
    "add_rms_norm_quantize",
    "add_rms_norm_quantize_per_token",
    "quantize",
    "quantize_per_token",
    "rms_norm_quantize",
    "rms_norm_quantize_per_token",
    "silu_mul_quantize",
    "silu_mul_quantize_per_token",
]
