"""``moe_route_quantize`` and its siblings in torch: both ops in sequence."""

from torch import Tensor

from nvfp4_kernels.moe.quantize import reference as quantizing
from nvfp4_kernels.moe.route.reference import moe_route
from nvfp4_kernels.moe.routing import Routing


def moe_route_quantize(
    x: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    num_experts: int,
    tile_tokens: int,
    global_scale: Tensor,
    topk_weights: Tensor | None,
    terms: int,
) -> tuple[Tensor, ...]:
    """See ``nvfp4_kernels.moe.route_quantize.op.moe_route_quantize``."""
    routing = Routing(*moe_route(topk_ids, expert_map, num_experts, tile_tokens))
    return (*routing, *quantizing.moe_quantize(x, routing, global_scale, topk_weights, terms))


def moe_route_quantize_per_token(
    x: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    num_experts: int,
    tile_tokens: int,
    topk_weights: Tensor | None,
    terms: int,
) -> tuple[Tensor, ...]:
    """See ``nvfp4_kernels.moe.route_quantize.op.moe_route_quantize_per_token``."""
    routing = Routing(*moe_route(topk_ids, expert_map, num_experts, tile_tokens))
    return (*routing, *quantizing.moe_quantize_per_token(x, routing, topk_weights, terms))


def moe_route_gather(
    x: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    num_experts: int,
    tile_tokens: int,
    topk_weights: Tensor | None,
) -> tuple[Tensor, ...]:
    """See ``nvfp4_kernels.moe.route_quantize.op.moe_route_gather``."""
    routing = Routing(*moe_route(topk_ids, expert_map, num_experts, tile_tokens))
    return (*routing, quantizing.moe_gather(x, routing, topk_weights))
