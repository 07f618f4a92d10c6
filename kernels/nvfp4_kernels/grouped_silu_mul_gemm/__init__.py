"""C[t] = f(alpha[e, 0] · A[t] · B[e, 0]ᵀ) · (alpha[e, 1] · A[t] · B[e, 1]ᵀ), tile t of expert e."""

from nvfp4_kernels.grouped_silu_mul_gemm.op import (
    grouped_silu_mul_gemm,
    grouped_silu_mul_gemm_quantized,
)

__all__ = ["grouped_silu_mul_gemm", "grouped_silu_mul_gemm_quantized"]
