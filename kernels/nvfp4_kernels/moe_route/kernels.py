"""Kernels of ``moe_route``."""

from nvfp4_kernels.dispatch import KernelTable

KERNELS = KernelTable(
    "moe_route",
    {("cpu", "float"): ("reference", "nvfp4_kernels.moe_route.reference:moe_route")},
)
