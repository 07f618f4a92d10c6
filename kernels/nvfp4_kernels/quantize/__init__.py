"""Activations to NVFP4 with blocked scales."""

from nvfp4_kernels.quantize.op import quantize, quantize_per_token

__all__ = ["quantize", "quantize_per_token"]
