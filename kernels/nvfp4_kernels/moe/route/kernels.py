"""Kernel table of ``moe_route``."""

from nvfp4_kernels.dispatch import KernelTable

_KERNEL = ("MoeRoute", "nvfp4_kernels.moe.route.kernel:moe_route")

KERNELS = KernelTable(
    "moe_route",
    {
        ("cpu", "float"): ("reference", "nvfp4_kernels.moe.route.reference:moe_route"),
        ("sm_90", "float"): _KERNEL,
        ("sm_100", "float"): _KERNEL,
    },
)
