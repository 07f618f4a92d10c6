"""GEMMs with NVFP4 weights: plain, gate and up with SiLU-mul, and grouped (MoE) forms of both."""

from nvfp4_kernels.gemm.grouped.op import grouped_gemm
from nvfp4_kernels.gemm.grouped_silu_mul.op import grouped_silu_mul_gemm
from nvfp4_kernels.gemm.op import gemm, gemv
from nvfp4_kernels.gemm.silu_mul.op import silu_mul_gemm

__all__ = [
    "gemm",
    "gemv",
    "grouped_gemm",
    "grouped_silu_mul_gemm",
    "silu_mul_gemm",
]
