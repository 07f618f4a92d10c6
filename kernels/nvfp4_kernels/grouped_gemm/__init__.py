"""D[t] = alpha[e] · A[t] · B[e]ᵀ, token tile t of expert e; NVFP4 weights."""

from nvfp4_kernels.grouped_gemm.op import grouped_gemm, grouped_gemm_quantized

__all__ = ["grouped_gemm", "grouped_gemm_quantized"]
