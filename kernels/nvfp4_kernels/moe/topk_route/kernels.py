"""Kernels of ``moe_topk_route_quantize`` and its siblings."""

from nvfp4_kernels.dispatch import KernelTable

_REFERENCE = "nvfp4_kernels.moe.topk_route.reference"
_SM100 = "nvfp4_kernels.moe.topk_route.sm100"
_GATHER = ("MoeTopkRouteGather", "nvfp4_kernels.moe.topk_route.gather:moe_topk_route_gather")

KERNELS = KernelTable(
    "moe_topk_route_quantize",
    {
        ("cpu", "w4a4"): ("reference", f"{_REFERENCE}:moe_topk_route_quantize"),
        ("sm_100", "w4a4"): ("MoeTopkRouteQuantizeSm100", f"{_SM100}:moe_topk_route_quantize"),
    },
)
PER_TOKEN_KERNELS = KernelTable(
    "moe_topk_route_quantize_per_token",
    {
        ("cpu", "w4a4"): ("reference", f"{_REFERENCE}:moe_topk_route_quantize_per_token"),
        ("sm_100", "w4a4"): (
            "MoeTopkRouteQuantizeSm100",
            f"{_SM100}:moe_topk_route_quantize_per_token",
        ),
    },
)
GATHER_KERNELS = KernelTable(
    "moe_topk_route_gather",
    {
        ("cpu", "float"): ("reference", f"{_REFERENCE}:moe_topk_route_gather"),
        ("sm_90", "float"): _GATHER,
        ("sm_100", "float"): _GATHER,
    },
)
