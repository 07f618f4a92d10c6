"""D = alpha · A · Bᵀ (+ bias), NVFP4 weight."""

from nvfp4_kernels.gemm.op import gemm

__all__ = ["gemm"]
