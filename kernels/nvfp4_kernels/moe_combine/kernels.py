"""Kernels of ``moe_combine``."""

from nvfp4_kernels.dispatch import KernelTable

KERNELS = KernelTable(
    "moe_combine",
    {("cpu", "float"): ("reference", "nvfp4_kernels.moe_combine.reference:moe_combine")},
)
