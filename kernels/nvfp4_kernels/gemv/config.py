"""Kernels of ``gemv``; ``sm100.choose`` configures those of sm_100."""

from nvfp4_kernels.dispatch import KernelTable

KERNELS = KernelTable(
    "gemv",
    {
        ("cpu", "w4a4"): ("reference", "nvfp4_kernels.gemv.reference:gemv"),
        ("cpu", "w4a16"): ("reference", "nvfp4_kernels.gemv.reference:gemv"),
        ("sm_90", "w4a16"): ("wgmma", "nvfp4_kernels.gemv.sm90:gemv", "fragments"),
        ("sm_100", "w4a4"): ("block_scaled", "nvfp4_kernels.gemv.sm100:gemv"),
    },
)

# One tile of tokens: the N = 32 side of a swapped tcgen05.mma.
MAX_M = 32
