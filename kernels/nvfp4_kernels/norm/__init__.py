"""Residual addition and RMS norm, in 16 bits."""

from nvfp4_kernels.norm.op import add_rms_norm

__all__ = [
    "add_rms_norm",
]
