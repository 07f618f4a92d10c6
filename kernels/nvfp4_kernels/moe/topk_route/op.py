"""``moe_topk_route_quantize`` and its siblings: from router logits to token tiles.

Bit-identical to ``moe_topk``, then ``moe_route``, then ``moe_quantize`` or ``moe_gather``. A GPU
needs one launch if each CTA can sort all slots of the batch, else two or three launches.
"""

import torch
from torch import Tensor

from nvfp4_kernels.checks import (
    InvalidArgument,
    check_blocks_of_16,
    check_dtype,
    check_same_device,
    check_shape,
)
from nvfp4_kernels.formats.terms import check_terms
from nvfp4_kernels.moe.quantize.op import DTYPES, new_tiles
from nvfp4_kernels.moe.route.op import check_sizes, new_routing
from nvfp4_kernels.moe.router import Router, check_router, checked
from nvfp4_kernels.moe.routing import Routing, check_tile_tokens
from nvfp4_kernels.moe.topk.op import new_topk, router_of
from nvfp4_kernels.moe.topk_route.kernels import GATHER_KERNELS, KERNELS, PER_TOKEN_KERNELS


def moe_topk_route_quantize(
    x: Tensor,
    logits: Tensor,
    router: Router,
    num_experts: int,
    tile_tokens: int,
    global_scale: Tensor,
    expert_map: Tensor | None = None,
    bias: Tensor | None = None,
    padding: Tensor | None = None,
    terms: int = 1,
) -> tuple[Tensor, Routing, Tensor, Tensor]:
    """Select the experts of a batch, route and quantise its tokens into token tiles.

    Args:
        x: bfloat16 or float16 ``(M, K)``, as for ``moe_quantize``.
        logits: ``(M, E)``, as for ``moe_topk``; E is the length of ``expert_map``, or
            ``num_experts``.
        router: as for ``moe_topk``.
        num_experts: as for ``moe_route``.
        tile_tokens: as for ``moe_route``.
        global_scale: as for ``moe_quantize``.
        expert_map: as for ``moe_route``.
        bias: as for ``moe_topk``.
        padding: as for ``moe_topk``.
        terms: as for ``moe_quantize``.

    Returns:
        ``topk_weights`` of ``moe_topk``, the ``Routing`` of ``moe_route``, ``data`` and ``scales``
        of ``moe_quantize``.

    Raises:
        InvalidArgument, NoKernelError: as these ops.
    """
    weights, groups, slots, rows, data, scales = torch.ops.nvfp4.moe_topk_route_quantize(
        x, logits, bias, padding, expert_map, num_experts, tile_tokens, global_scale, terms,
        *checked(router),
    )  # fmt: skip
    return weights, Routing(groups, slots, rows), data, scales


def moe_topk_route_quantize_per_token(
    x: Tensor,
    logits: Tensor,
    router: Router,
    num_experts: int,
    tile_tokens: int,
    expert_map: Tensor | None = None,
    bias: Tensor | None = None,
    padding: Tensor | None = None,
    terms: int = 1,
) -> tuple[Tensor, Routing, Tensor, Tensor, Tensor]:
    """Select the experts of a batch, route and quantise its tokens, with a scale per token.

    Arguments as for ``moe_topk_route_quantize``.

    Returns:
        ``topk_weights``, the ``Routing``, ``data``, ``scales`` and ``row_scale`` of
        ``moe_quantize_per_token``.

    Raises:
        InvalidArgument, NoKernelError: as ``moe_topk_route_quantize``.
    """
    weights, groups, slots, rows, *parts = torch.ops.nvfp4.moe_topk_route_quantize_per_token(
        x, logits, bias, padding, expert_map, num_experts, tile_tokens, terms, *checked(router)
    )
    return weights, Routing(groups, slots, rows), *parts


def moe_topk_route_gather(
    x: Tensor,
    logits: Tensor,
    router: Router,
    num_experts: int,
    tile_tokens: int,
    expert_map: Tensor | None = None,
    bias: Tensor | None = None,
    padding: Tensor | None = None,
) -> tuple[Tensor, Routing, Tensor]:
    """Select the experts of a batch, route and permute its tokens into token tiles.

    Arguments as for ``moe_topk_route_quantize``.

    Returns:
        ``topk_weights``, the ``Routing``, and the ``(tiles, T, K)`` of ``moe_gather``.

    Raises:
        InvalidArgument, NoKernelError: as ``moe_topk_route_quantize``.
    """
    weights, groups, slots, rows, out = torch.ops.nvfp4.moe_topk_route_gather(
        x, logits, bias, padding, expert_map, num_experts, tile_tokens, *checked(router)
    )
    return weights, Routing(groups, slots, rows), out


def _check(
    x: Tensor,
    logits: Tensor,
    bias: Tensor | None,
    padding: Tensor | None,
    expert_map: Tensor | None,
    num_experts: int,
    tile_tokens: int,
    router: Router,
) -> None:
    check_router(router, logits, bias, padding)
    check_sizes(num_experts, expert_map)
    check_tile_tokens("tile_tokens", tile_tokens)
    experts = num_experts if expert_map is None else len(expert_map)
    check_shape("logits", logits, (logits.shape[0], experts), "one for each of all ranks' experts")
    check_dtype("x", x, DTYPES)
    if x.ndim != 2:
        raise InvalidArgument(
            f"x: shape is {tuple(x.shape)}, must be (M, K); rows that lie in tiles are routed"
        )
    check_blocks_of_16("x", x.shape)
    check_shape("x", x, (logits.shape[0], x.shape[1]), "a row for each of logits")
    check_same_device(x=x, logits=logits, expert_map=expert_map)


@torch.library.custom_op("nvfp4::moe_topk_route_quantize", mutates_args=())
def _moe_topk_route_quantize(
    x: Tensor,
    logits: Tensor,
    bias: Tensor | None,
    padding: Tensor | None,
    expert_map: Tensor | None,
    num_experts: int,
    tile_tokens: int,
    global_scale: Tensor,
    terms: int,
    top_k: int,
    scoring: str,
    renormalize: bool,
    groups: int,
    top_groups: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    router = router_of(top_k, scoring, renormalize, groups, top_groups, scale)
    common = logits, bias, padding, expert_map, num_experts, tile_tokens
    _check(x, *common, router)
    check_terms("terms", terms)
    check_dtype("global_scale", global_scale, (torch.float32,))
    check_shape("global_scale", global_scale, (), "for one per row use the per-token form")
    check_same_device(x=x, global_scale=global_scale)
    kernel = KERNELS.select(x.device, "w4a4").load()
    return kernel(x, *common, global_scale, terms, router)


@_moe_topk_route_quantize.register_fake
def _(
    x: Tensor,
    logits: Tensor,
    bias: Tensor | None,
    padding: Tensor | None,
    expert_map: Tensor | None,
    num_experts: int,
    tile_tokens: int,
    global_scale: Tensor,
    terms: int,
    top_k: int,
    *rule: object,
) -> tuple[Tensor, ...]:
    weights, routing = _new_routing(logits, num_experts, tile_tokens, top_k)
    return (weights, *routing, *new_tiles(x, routing[1], terms))


@torch.library.custom_op("nvfp4::moe_topk_route_quantize_per_token", mutates_args=())
def _moe_topk_route_quantize_per_token(
    x: Tensor,
    logits: Tensor,
    bias: Tensor | None,
    padding: Tensor | None,
    expert_map: Tensor | None,
    num_experts: int,
    tile_tokens: int,
    terms: int,
    top_k: int,
    scoring: str,
    renormalize: bool,
    groups: int,
    top_groups: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    router = router_of(top_k, scoring, renormalize, groups, top_groups, scale)
    common = logits, bias, padding, expert_map, num_experts, tile_tokens
    _check(x, *common, router)
    check_terms("terms", terms)
    kernel = PER_TOKEN_KERNELS.select(x.device, "w4a4").load()
    return kernel(x, *common, terms, router)


@_moe_topk_route_quantize_per_token.register_fake
def _(
    x: Tensor,
    logits: Tensor,
    bias: Tensor | None,
    padding: Tensor | None,
    expert_map: Tensor | None,
    num_experts: int,
    tile_tokens: int,
    terms: int,
    top_k: int,
    *rule: object,
) -> tuple[Tensor, ...]:
    weights, routing = _new_routing(logits, num_experts, tile_tokens, top_k)
    row_scale = x.new_empty(routing[1].shape, dtype=torch.float32)
    return (weights, *routing, *new_tiles(x, routing[1], terms), row_scale)


@torch.library.custom_op("nvfp4::moe_topk_route_gather", mutates_args=())
def _moe_topk_route_gather(
    x: Tensor,
    logits: Tensor,
    bias: Tensor | None,
    padding: Tensor | None,
    expert_map: Tensor | None,
    num_experts: int,
    tile_tokens: int,
    top_k: int,
    scoring: str,
    renormalize: bool,
    groups: int,
    top_groups: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    router = router_of(top_k, scoring, renormalize, groups, top_groups, scale)
    common = logits, bias, padding, expert_map, num_experts, tile_tokens
    _check(x, *common, router)
    kernel = GATHER_KERNELS.select(x.device, "float").load()
    return kernel(x, *common, router)


@_moe_topk_route_gather.register_fake
def _(
    x: Tensor,
    logits: Tensor,
    bias: Tensor | None,
    padding: Tensor | None,
    expert_map: Tensor | None,
    num_experts: int,
    tile_tokens: int,
    top_k: int,
    *rule: object,
) -> tuple[Tensor, ...]:
    weights, routing = _new_routing(logits, num_experts, tile_tokens, top_k)
    return (weights, *routing, x.new_empty((*routing[1].shape, x.shape[1])))


def _new_routing(
    logits: Tensor, num_experts: int, tile_tokens: int, top_k: int
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Memory for routing weights, and for the parts of a routing."""
    weights, _ = new_topk(logits, top_k)
    return weights, new_routing(logits, weights.shape, num_experts, tile_tokens)
