"""D = alpha · A · Bᵀ (+ bias), NVFP4 weight."""

from nvfp4_kernels.gemm.op import gemm, gemm_quantized, gemv

__all__ = ["gemm", "gemm_quantized", "gemv"]
