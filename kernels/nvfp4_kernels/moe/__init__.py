"""Routing of a mixture of experts: top-k, align and permute, quantisation, unpermute (combine)."""

from nvfp4_kernels.moe.combine.op import moe_combine
from nvfp4_kernels.moe.quantize.op import moe_gather, moe_quantize, moe_quantize_per_token
from nvfp4_kernels.moe.route.op import moe_route
from nvfp4_kernels.moe.route_quantize.op import (
    moe_route_gather,
    moe_route_quantize,
    moe_route_quantize_per_token,
)
from nvfp4_kernels.moe.router import Router
from nvfp4_kernels.moe.topk.op import moe_topk
from nvfp4_kernels.moe.topk_route.op import (
    moe_topk_route_gather,
    moe_topk_route_quantize,
    moe_topk_route_quantize_per_token,
)

__all__ = [
    "Router",
    "moe_combine",
    "moe_gather",
    "moe_quantize",
    "moe_quantize_per_token",
    "moe_route",
    "moe_route_gather",
    "moe_route_quantize",
    "moe_route_quantize_per_token",
    "moe_topk",
    "moe_topk_route_gather",
    "moe_topk_route_quantize",
    "moe_topk_route_quantize_per_token",
]
