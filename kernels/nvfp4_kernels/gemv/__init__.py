"""The product of a decode step: at most 32 rows against an NVFP4 weight."""

from nvfp4_kernels.gemv.op import gemv

__all__ = ["gemv"]
