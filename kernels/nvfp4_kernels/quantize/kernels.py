"""Kernels of ``quantize`` and ``quantize_per_token``."""

from nvfp4_kernels.dispatch import KernelTable

KERNELS = KernelTable(
    "quantize",
    {
        ("cpu", "w4a4"): ("reference", "nvfp4_kernels.quantize.reference:quantize"),
        ("sm_100", "w4a4"): ("QuantizeSm100", "nvfp4_kernels.quantize.sm100:quantize"),
    },
)
PER_TOKEN_KERNELS = KernelTable(
    "quantize_per_token",
    {
        ("cpu", "w4a4"): ("reference", "nvfp4_kernels.quantize.reference:quantize_per_token"),
        ("sm_100", "w4a4"): ("QuantizeSm100", "nvfp4_kernels.quantize.sm100:quantize_per_token"),
    },
)
