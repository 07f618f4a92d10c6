"""Kernel table of ``rotary_store``, one source for both architectures."""

from nvfp4_kernels.dispatch import KernelTable

_KERNEL = ("RotaryStore", "nvfp4_kernels.rotary.store.launch:rotary_store")

KERNELS = KernelTable(
    "rotary_store",
    {
        ("cpu", "float", "fp8_kv"): (
            "reference",
            "nvfp4_kernels.rotary.store.reference:rotary_store",
        ),
        ("sm_90", "float", "fp8_kv"): _KERNEL,
        ("sm_100", "float", "fp8_kv"): _KERNEL,
    },
)
