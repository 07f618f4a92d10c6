"""``grouped_silu_mul_gemm`` in torch: the formula, and the kernel on CPU."""

from nvfp4_kernels.gemm.grouped.reference import grouped_gemm

# For pairs of weights it computes this op.
grouped_silu_mul_gemm = grouped_gemm
