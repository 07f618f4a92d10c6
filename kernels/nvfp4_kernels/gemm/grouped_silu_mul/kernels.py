"""Kernel table of ``grouped_silu_mul_gemm``: on GPUs ``gemm``'s kernels, with pairs of weights."""

from nvfp4_kernels.dispatch import KernelTable

KERNELS = KernelTable(
    "grouped_silu_mul_gemm",
    {
        ("cpu", "w4a4", "w4a16", "w4a8"): (
            "reference",
            "nvfp4_kernels.gemm.grouped_silu_mul.reference:grouped_silu_mul_gemm",
        ),
        ("sm_90", "w4a16"): (
            "wgmma",
            "nvfp4_kernels.gemm.sm90.launch_grouped:grouped_silu_mul_gemm",
            "fragments",
        ),
        ("sm_90", "w4a8"): (
            "fp8_wgmma",
            "nvfp4_kernels.gemm.sm90.launch_grouped:grouped_silu_mul_gemm",
            "folded",
        ),
        ("sm_100", "w4a4"): (
            "block_scaled",
            "nvfp4_kernels.gemm.sm100.launch_grouped:grouped_silu_mul_gemm",
        ),
    },
)
