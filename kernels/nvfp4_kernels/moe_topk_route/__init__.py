"""Choice of a batch's experts and its tokens in token tiles by one launch, from logits on."""

from nvfp4_kernels.moe_topk_route.op import (
    moe_topk_route_gather,
    moe_topk_route_quantize,
    moe_topk_route_quantize_per_token,
)

__all__ = [
    "moe_topk_route_gather",
    "moe_topk_route_quantize",
    "moe_topk_route_quantize_per_token",
]
