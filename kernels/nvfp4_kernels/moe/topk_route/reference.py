"""``moe_topk_route_quantize`` and its siblings in torch: the ops in sequence."""

from torch import Tensor

from nvfp4_kernels.moe.route_quantize import reference as routing
from nvfp4_kernels.moe.router import Router
from nvfp4_kernels.moe.topk.reference import moe_topk


def moe_topk_route_quantize(
    x: Tensor,
    logits: Tensor,
    bias: Tensor | None,
    padding: Tensor | None,
    expert_map: Tensor | None,
    num_experts: int,
    tile_tokens: int,
    global_scale: Tensor,
    terms: int,
    router: Router,
) -> tuple[Tensor, ...]:
    """See ``nvfp4_kernels.moe.topk_route.op.moe_topk_route_quantize``."""
    weights, ids = moe_topk(logits, bias, padding, router)
    sizes = num_experts, tile_tokens
    return (
        weights,
        *routing.moe_route_quantize(x, ids, expert_map, *sizes, global_scale, None, terms),
    )


def moe_topk_route_quantize_per_token(
    x: Tensor,
    logits: Tensor,
    bias: Tensor | None,
    padding: Tensor | None,
    expert_map: Tensor | None,
    num_experts: int,
    tile_tokens: int,
    terms: int,
    router: Router,
) -> tuple[Tensor, ...]:
    """See ``nvfp4_kernels.moe.topk_route.op.moe_topk_route_quantize_per_token``."""
    weights, ids = moe_topk(logits, bias, padding, router)
    sizes = num_experts, tile_tokens
    return (
        weights,
        *routing.moe_route_quantize_per_token(x, ids, expert_map, *sizes, None, terms),
    )


def moe_topk_route_gather(
    x: Tensor,
    logits: Tensor,
    bias: Tensor | None,
    padding: Tensor | None,
    expert_map: Tensor | None,
    num_experts: int,
    tile_tokens: int,
    router: Router,
) -> tuple[Tensor, ...]:
    """See ``nvfp4_kernels.moe.topk_route.op.moe_topk_route_gather``."""
    weights, ids = moe_topk(logits, bias, padding, router)
    return weights, *routing.moe_route_gather(x, ids, expert_map, num_experts, tile_tokens, None)
