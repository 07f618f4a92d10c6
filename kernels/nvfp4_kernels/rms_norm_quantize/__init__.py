"""RMSNorm, with or without the addition before it, to NVFP4 with blocked scales."""

from nvfp4_kernels.rms_norm_quantize.op import (
    add_rms_norm_quantize,
    add_rms_norm_quantize_per_token,
    rms_norm_quantize,
    rms_norm_quantize_per_token,
)

__all__ = [
    "add_rms_norm_quantize",
    "add_rms_norm_quantize_per_token",
    "rms_norm_quantize",
    "rms_norm_quantize_per_token",
]
