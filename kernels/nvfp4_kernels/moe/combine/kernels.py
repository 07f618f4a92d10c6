"""Kernel table of ``moe_combine``."""

from nvfp4_kernels.dispatch import KernelTable

_KERNEL = ("MoeCombine", "nvfp4_kernels.moe.combine.kernel:moe_combine")

KERNELS = KernelTable(
    "moe_combine",
    {
        ("cpu", "float"): ("reference", "nvfp4_kernels.moe.combine.reference:moe_combine"),
        ("sm_90", "float"): _KERNEL,
        ("sm_100", "float"): _KERNEL,
    },
)
