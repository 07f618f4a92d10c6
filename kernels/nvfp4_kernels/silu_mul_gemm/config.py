"""Kernels of ``silu_mul_gemm``; ``sm100.choose`` configures those of sm_100."""

from nvfp4_kernels.dispatch import KernelTable

KERNELS = KernelTable(
    "silu_mul_gemm",
    {
        ("cpu", "w4a4"): ("reference", "nvfp4_kernels.silu_mul_gemm.reference:silu_mul_gemm"),
        ("cpu", "w4a16"): ("reference", "nvfp4_kernels.silu_mul_gemm.reference:silu_mul_gemm"),
        ("sm_90", "w4a16"): (
            "wgmma",
            "nvfp4_kernels.silu_mul_gemm.sm90:silu_mul_gemm",
            "fragments",
        ),
        ("sm_100", "w4a4"): ("block_scaled", "nvfp4_kernels.silu_mul_gemm.sm100:silu_mul_gemm"),
    },
)
