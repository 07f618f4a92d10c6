"""Kernels of ``moe_route_quantize`` and its siblings."""

from nvfp4_kernels.dispatch import KernelTable

_REFERENCE = "nvfp4_kernels.moe.route_quantize.reference"
_SM100 = "nvfp4_kernels.moe.route_quantize.sm100"
_GATHER = ("MoeRouteGather", "nvfp4_kernels.moe.route_quantize.gather:moe_route_gather")

KERNELS = KernelTable(
    "moe_route_quantize",
    {
        ("cpu", "w4a4"): ("reference", f"{_REFERENCE}:moe_route_quantize"),
        ("sm_100", "w4a4"): ("MoeRouteQuantizeSm100", f"{_SM100}:moe_route_quantize"),
    },
)
PER_TOKEN_KERNELS = KernelTable(
    "moe_route_quantize_per_token",
    {
        ("cpu", "w4a4"): ("reference", f"{_REFERENCE}:moe_route_quantize_per_token"),
        ("sm_100", "w4a4"): ("MoeRouteQuantizeSm100", f"{_SM100}:moe_route_quantize_per_token"),
    },
)
GATHER_KERNELS = KernelTable(
    "moe_route_gather",
    {
        ("cpu", "float"): ("reference", f"{_REFERENCE}:moe_route_gather"),
        ("sm_90", "float"): _GATHER,
        ("sm_100", "float"): _GATHER,
    },
)
