"""silu(gate) · up, to NVFP4 with blocked scales."""

from nvfp4_kernels.silu_mul_quantize.op import silu_mul_quantize, silu_mul_quantize_per_token

__all__ = ["silu_mul_quantize", "silu_mul_quantize_per_token"]
