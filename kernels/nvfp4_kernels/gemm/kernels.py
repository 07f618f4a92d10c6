"""Kernel table of ``gemm``."""

from nvfp4_kernels.dispatch import KernelTable

KERNELS = KernelTable(
    "gemm",
    {
        ("cpu", "w4a4", "w4a16", "w4a8"): ("reference", "nvfp4_kernels.gemm.reference:gemm"),
        ("sm_90", "w4a16"): ("wgmma", "nvfp4_kernels.gemm.sm90.launch:gemm", "fragments"),
        ("sm_90", "w4a8"): ("fp8_wgmma", "nvfp4_kernels.gemm.sm90.launch:gemm", "folded"),
        ("sm_100", "w4a4"): ("block_scaled", "nvfp4_kernels.gemm.sm100.launch:gemm"),
    },
    {
        ("cpu", "w4a4", "w4a16", "w4a8"): (
            "reference",
            "nvfp4_kernels.gemm.reference:gemm_batch_invariant",
        ),
        ("sm_90", "w4a16"): (
            "wgmma",
            "nvfp4_kernels.gemm.sm90.launch:gemm_batch_invariant",
            "fragments",
        ),
        ("sm_90", "w4a8"): (
            "fp8_wgmma",
            "nvfp4_kernels.gemm.sm90.launch:gemm_batch_invariant",
            "folded",
        ),
        ("sm_100", "w4a4"): (
            "block_scaled",
            "nvfp4_kernels.gemm.sm100.launch:gemm_batch_invariant",
        ),
    },
)

# Rows of activations that ``gemv`` takes: one tile on the N side of a tcgen05.mma.
MAX_GEMV_ROWS = 32
