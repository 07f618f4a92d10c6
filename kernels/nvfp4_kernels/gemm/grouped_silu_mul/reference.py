"""``grouped_silu_mul_gemm`` in torch: the reference, which is also the CPU kernel."""

from nvfp4_kernels.gemm.grouped.reference import grouped_gemm

# For pairs of weights it computes this op.
grouped_silu_mul_gemm = grouped_gemm
