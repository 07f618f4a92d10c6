"""Kernel table of ``rotary_store``, one source for both architectures."""

from nvfp4_kernels.dispatch import KernelTable

_REFERENCE = ("reference", "nvfp4_kernels.rotary.store.reference:rotary_store")
_KERNEL = ("RotaryStore", "nvfp4_kernels.rotary.store.launch:rotary_store")

KERNELS = KernelTable(
    "rotary_store",
    {
        ("cpu", "float"): _REFERENCE,
        ("cpu", "fp8_kv"): _REFERENCE,
        ("sm_90", "float"): _KERNEL,
        ("sm_90", "fp8_kv"): _KERNEL,
        ("sm_100", "float"): _KERNEL,
        ("sm_100", "fp8_kv"): _KERNEL,
    },
)
