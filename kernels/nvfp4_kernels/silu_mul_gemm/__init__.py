"""C = silu(alpha1 · A · B1ᵀ) · (alpha2 · A · B2ᵀ), NVFP4 weights."""

from nvfp4_kernels.silu_mul_gemm.op import silu_mul_gemm, silu_mul_gemm_quantized

__all__ = ["silu_mul_gemm", "silu_mul_gemm_quantized"]
