"""``grouped_silu_mul_gemm`` in torch: the formula, and the kernel on CPU."""

from nvfp4_kernels.gemm.grouped.reference import grouped_gemm

# Of weights in pairs that is what it computes.
grouped_silu_mul_gemm = grouped_gemm
