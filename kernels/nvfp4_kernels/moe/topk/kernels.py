"""Kernel table of ``moe_topk``."""

from nvfp4_kernels.dispatch import KernelTable

_KERNEL = ("MoeTopk", "nvfp4_kernels.moe.topk.kernel:moe_topk")

KERNELS = KernelTable(
    "moe_topk",
    {
        ("cpu", "float"): ("reference", "nvfp4_kernels.moe.topk.reference:moe_topk"),
        ("sm_90", "float"): _KERNEL,
        ("sm_100", "float"): _KERNEL,
    },
)
