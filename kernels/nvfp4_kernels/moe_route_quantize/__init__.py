"""Routing of a batch and its tokens in token tiles by one launch, where the batch is small."""

from nvfp4_kernels.moe_route_quantize.op import (
    moe_route_gather,
    moe_route_quantize,
    moe_route_quantize_per_token,
)

__all__ = ["moe_route_gather", "moe_route_quantize", "moe_route_quantize_per_token"]
