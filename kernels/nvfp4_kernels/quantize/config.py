"""Kernels of ``quantize`` and ``quantize_per_token``."""

from nvfp4_kernels.dispatch import KernelTable

KERNELS = KernelTable(
    "quantize", {("cpu", "w4a4"): ("reference", "nvfp4_kernels.quantize.reference:quantize")}
)
PER_TOKEN_KERNELS = KernelTable(
    "quantize_per_token",
    {("cpu", "w4a4"): ("reference", "nvfp4_kernels.quantize.reference:quantize_per_token")},
)
