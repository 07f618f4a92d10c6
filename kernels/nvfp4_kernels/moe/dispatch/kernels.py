"""Kernel table of ``moe_dispatch``: one class for all sources; NVFP4 on sm_100, E4M3 on sm_90."""

from nvfp4_kernels.dispatch import KernelTable

_KERNEL = ("MoeDispatch", "nvfp4_kernels.moe.dispatch.launch:moe_dispatch")

KERNELS = KernelTable(
    "moe_dispatch",
    {
        ("cpu", "w4a4", "w4a8", "float"): (
            "reference",
            "nvfp4_kernels.moe.dispatch.reference:moe_dispatch",
        ),
        ("sm_90", "w4a8", "float"): _KERNEL,
        ("sm_100", "w4a4", "float"): _KERNEL,
    },
)
