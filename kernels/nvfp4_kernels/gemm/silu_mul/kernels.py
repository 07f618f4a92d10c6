"""Kernel table of ``silu_mul_gemm``: on GPUs the kernels of ``gemm``, with two weights."""

from nvfp4_kernels.dispatch import KernelTable

KERNELS = KernelTable(
    "silu_mul_gemm",
    {
        ("cpu", "w4a4", "w4a16", "w4a8"): (
            "reference",
            "nvfp4_kernels.gemm.silu_mul.reference:silu_mul_gemm",
        ),
        ("sm_90", "w4a16"): (
            "wgmma",
            "nvfp4_kernels.gemm.sm90.launch:silu_mul_gemm",
            "fragments",
        ),
        ("sm_90", "w4a8"): (
            "fp8_wgmma",
            "nvfp4_kernels.gemm.sm90.launch:silu_mul_gemm",
            "folded",
        ),
        ("sm_100", "w4a4"): ("block_scaled", "nvfp4_kernels.gemm.sm100.launch:silu_mul_gemm"),
    },
    {
        ("cpu", "w4a4", "w4a16", "w4a8"): (
            "reference",
            "nvfp4_kernels.gemm.silu_mul.reference:silu_mul_gemm_batch_invariant",
        ),
        ("sm_90", "w4a16"): (
            "wgmma",
            "nvfp4_kernels.gemm.sm90.launch:silu_mul_gemm_batch_invariant",
            "fragments",
        ),
        ("sm_90", "w4a8"): (
            "fp8_wgmma",
            "nvfp4_kernels.gemm.sm90.launch:silu_mul_gemm_batch_invariant",
            "folded",
        ),
        ("sm_100", "w4a4"): (
            "block_scaled",
            "nvfp4_kernels.gemm.sm100.launch:silu_mul_gemm_batch_invariant",
        ),
    },
)
