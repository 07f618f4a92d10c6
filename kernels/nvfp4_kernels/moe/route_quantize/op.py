"""``moe_route_quantize`` and its siblings: from top-k experts to token tiles.

Bit-identical to ``moe_route`` and then ``moe_quantize`` or ``moe_gather``. A GPU needs one launch
if the batch is so small that each CTA sorts it as fast as it could wait for another kernel, else
two launches.
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
from nvfp4_kernels.moe.quantize.op import DTYPES, check_topk_weights, new_tiles
from nvfp4_kernels.moe.route.op import check_ids, new_routing
from nvfp4_kernels.moe.route_quantize.kernels import GATHER_KERNELS, KERNELS, PER_TOKEN_KERNELS
from nvfp4_kernels.moe.routing import Routing, check_tile_tokens


def moe_route_quantize(
    x: Tensor,
    topk_ids: Tensor,
    num_experts: int,
    tile_tokens: int,
    global_scale: Tensor,
    expert_map: Tensor | None = None,
    topk_weights: Tensor | None = None,
    terms: int = 1,
) -> tuple[Routing, Tensor, Tensor]:
    """Route a batch and quantise its tokens into token tiles.

    Args:
        x: bfloat16 or float16 ``(M, K)``, as for ``moe_quantize``.
        topk_ids: int32 ``(M, k)``, as for ``moe_route``.
        num_experts: as for ``moe_route``.
        tile_tokens: as for ``moe_route``.
        global_scale: as for ``moe_quantize``.
        expert_map: as for ``moe_route``.
        topk_weights: as for ``moe_quantize``.
        terms: as for ``moe_quantize``.

    Returns:
        The ``Routing`` of ``moe_route``, ``data`` and ``scales`` of ``moe_quantize``.

    Raises:
        InvalidArgument, NoKernelError: as both ops.
    """
    groups, slots, rows, data, scales = torch.ops.nvfp4.moe_route_quantize(
        x, topk_ids, expert_map, num_experts, tile_tokens, global_scale, topk_weights, terms
    )
    return Routing(groups, slots, rows), data, scales


def moe_route_quantize_per_token(
    x: Tensor,
    topk_ids: Tensor,
    num_experts: int,
    tile_tokens: int,
    expert_map: Tensor | None = None,
    topk_weights: Tensor | None = None,
    terms: int = 1,
) -> tuple[Routing, Tensor, Tensor, Tensor]:
    """Route a batch and quantise its tokens, with a global scale per token.

    Arguments as for ``moe_route_quantize``.

    Returns:
        The ``Routing``, ``data``, ``scales`` and ``row_scale`` of ``moe_quantize_per_token``.

    Raises:
        InvalidArgument, NoKernelError: as ``moe_route_quantize``.
    """
    groups, slots, rows, *parts = torch.ops.nvfp4.moe_route_quantize_per_token(
        x, topk_ids, expert_map, num_experts, tile_tokens, topk_weights, terms
    )
    return Routing(groups, slots, rows), *parts


def moe_route_gather(
    x: Tensor,
    topk_ids: Tensor,
    num_experts: int,
    tile_tokens: int,
    expert_map: Tensor | None = None,
    topk_weights: Tensor | None = None,
) -> tuple[Routing, Tensor]:
    """Route a batch and permute its tokens into token tiles.

    Arguments as for ``moe_route_quantize``.

    Returns:
        The ``Routing``, and the ``(tiles, T, K)`` of ``moe_gather``.

    Raises:
        InvalidArgument, NoKernelError: as ``moe_route_quantize``.
    """
    groups, slots, rows, out = torch.ops.nvfp4.moe_route_gather(
        x, topk_ids, expert_map, num_experts, tile_tokens, topk_weights
    )
    return Routing(groups, slots, rows), out


def _check(
    x: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    num_experts: int,
    tile_tokens: int,
    topk_weights: Tensor | None,
) -> None:
    check_ids(topk_ids, expert_map, num_experts)
    check_tile_tokens("tile_tokens", tile_tokens)
    check_dtype("x", x, DTYPES)
    if x.ndim != 2:
        raise InvalidArgument(
            f"x: shape is {tuple(x.shape)}, must be (M, K); rows that lie in tiles are routed"
        )
    check_blocks_of_16("x", x.shape)
    check_shape("x", x, (topk_ids.shape[0], x.shape[1]), "a row for each of topk_ids")
    check_topk_weights(topk_weights, topk_ids)
    check_same_device(x=x, topk_ids=topk_ids)


@torch.library.custom_op("nvfp4::moe_route_quantize", mutates_args=())
def _moe_route_quantize(
    x: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    num_experts: int,
    tile_tokens: int,
    global_scale: Tensor,
    topk_weights: Tensor | None,
    terms: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    _check(x, topk_ids, expert_map, num_experts, tile_tokens, topk_weights)
    check_terms("terms", terms)
    check_dtype("global_scale", global_scale, (torch.float32,))
    check_shape("global_scale", global_scale, (), "for one per row use the per-token form")
    check_same_device(x=x, global_scale=global_scale)
    kernel = KERNELS.select(x.device, "w4a4").load()
    return kernel(
        x, topk_ids, expert_map, num_experts, tile_tokens, global_scale, topk_weights, terms
    )


@_moe_route_quantize.register_fake
def _(
    x: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    num_experts: int,
    tile_tokens: int,
    global_scale: Tensor,
    topk_weights: Tensor | None,
    terms: int,
) -> tuple[Tensor, ...]:
    routing = new_routing(topk_ids, topk_ids.shape, num_experts, tile_tokens)
    return (*routing, *new_tiles(x, routing[1], terms))


@torch.library.custom_op("nvfp4::moe_route_quantize_per_token", mutates_args=())
def _moe_route_quantize_per_token(
    x: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    num_experts: int,
    tile_tokens: int,
    topk_weights: Tensor | None,
    terms: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    _check(x, topk_ids, expert_map, num_experts, tile_tokens, topk_weights)
    check_terms("terms", terms)
    kernel = PER_TOKEN_KERNELS.select(x.device, "w4a4").load()
    return kernel(x, topk_ids, expert_map, num_experts, tile_tokens, topk_weights, terms)


@_moe_route_quantize_per_token.register_fake
def _(
    x: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    num_experts: int,
    tile_tokens: int,
    topk_weights: Tensor | None,
    terms: int,
) -> tuple[Tensor, ...]:
    routing = new_routing(topk_ids, topk_ids.shape, num_experts, tile_tokens)
    row_scale = x.new_empty(routing[1].shape, dtype=torch.float32)
    return (*routing, *new_tiles(x, routing[1], terms), row_scale)


@torch.library.custom_op("nvfp4::moe_route_gather", mutates_args=())
def _moe_route_gather(
    x: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    num_experts: int,
    tile_tokens: int,
    topk_weights: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check(x, topk_ids, expert_map, num_experts, tile_tokens, topk_weights)
    kernel = GATHER_KERNELS.select(x.device, "float").load()
    return kernel(x, topk_ids, expert_map, num_experts, tile_tokens, topk_weights)


@_moe_route_gather.register_fake
def _(
    x: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    num_experts: int,
    tile_tokens: int,
    topk_weights: Tensor | None,
) -> tuple[Tensor, ...]:
    routing = new_routing(topk_ids, topk_ids.shape, num_experts, tile_tokens)
    return (*routing, x.new_empty((*routing[1].shape, x.shape[1])))
