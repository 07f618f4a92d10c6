"""Kernels of ``moe_quantize``, ``moe_quantize_per_token`` and ``moe_gather``."""

from nvfp4_kernels.dispatch import KernelTable

_REFERENCE = "nvfp4_kernels.moe.quantize.reference"
_SM100 = "nvfp4_kernels.moe.quantize.sm100"
_GATHER = ("MoeGather", "nvfp4_kernels.moe.quantize.gather:moe_gather")

KERNELS = KernelTable(
    "moe_quantize",
    {
        ("cpu", "w4a4"): ("reference", f"{_REFERENCE}:moe_quantize"),
        ("sm_100", "w4a4"): ("MoeQuantizeSm100", f"{_SM100}:moe_quantize"),
    },
)
PER_TOKEN_KERNELS = KernelTable(
    "moe_quantize_per_token",
    {
        ("cpu", "w4a4"): ("reference", f"{_REFERENCE}:moe_quantize_per_token"),
        ("sm_100", "w4a4"): ("MoeQuantizeSm100", f"{_SM100}:moe_quantize_per_token"),
    },
)
GATHER_KERNELS = KernelTable(
    "moe_gather",
    {
        ("cpu", "float"): ("reference", f"{_REFERENCE}:moe_gather"),
        ("sm_90", "float"): _GATHER,
        ("sm_100", "float"): _GATHER,
    },
)
