"""Kernels of ``moe_quantize``, ``moe_quantize_per_token`` and ``moe_gather``."""

from nvfp4_kernels.dispatch import KernelTable

_REFERENCE = "nvfp4_kernels.moe_quantize.reference"

KERNELS = KernelTable(
    "moe_quantize", {("cpu", "w4a4"): ("reference", f"{_REFERENCE}:moe_quantize")}
)
PER_TOKEN_KERNELS = KernelTable(
    "moe_quantize_per_token",
    {("cpu", "w4a4"): ("reference", f"{_REFERENCE}:moe_quantize_per_token")},
)
GATHER_KERNELS = KernelTable(
    "moe_gather", {("cpu", "float"): ("reference", f"{_REFERENCE}:moe_gather")}
)
