"""Quantisation of activations to NVFP4 or E4M3, also after SiLU-mul or RMSNorm."""

from nvfp4_kernels.quantize.op import quantize
from nvfp4_kernels.quantize.rms_norm.op import add_rms_norm_quantize, rms_norm_quantize
from nvfp4_kernels.quantize.silu_mul.op import silu_mul_quantize

__all__ = [
    "add_rms_norm_quantize",
    "quantize",
    "rms_norm_quantize",
    "silu_mul_quantize",
]
