"""``moe_route``: sort of slots by expert into token tiles, like vLLM's ``moe_align_block_size``."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument, check_dtype, check_same_device
from nvfp4_kernels.moe.route.kernels import KERNELS
from nvfp4_kernels.moe.routing import Routing, check_tile_tokens, max_tiles

MAX_TOP_K = 32
MAX_EXPERTS = 1024


def moe_route(
    topk_ids: Tensor, num_experts: int, tile_tokens: int, expert_map: Tensor | None = None
) -> Routing:
    """Sort slots of a batch by expert, stably, into padded tiles of ``tile_tokens`` rows.

    Args:
        topk_ids: int32 ``(M, k)``, k at most 32, the experts of each token. An id that maps to no
            expert of this rank is skipped; a duplicate id counts twice.
        num_experts: number of experts whose weights this rank has, at most 1024.
        tile_tokens: T, one of ``routing.TILE_TOKENS``.
        expert_map: int32 ``(E,)``, local index of each global expert, -1 for experts of other
            ranks; None: ids are local.

    Returns:
        A ``Routing`` allocated for the worst case, ``routing.max_tiles`` tiles.

    Raises:
        InvalidArgument: an unsupported dtype, shape or number; the message names it.
        NoKernelError: no kernel for this device.
    """
    return Routing(*torch.ops.nvfp4.moe_route(topk_ids, expert_map, num_experts, tile_tokens))


def check_ids(topk_ids: Tensor, expert_map: Tensor | None, num_experts: int) -> None:
    """Check expert ids, the number of experts of this rank, and the expert map."""
    check_dtype("topk_ids", topk_ids, (torch.int32,))
    if topk_ids.ndim != 2 or not 0 < topk_ids.shape[1] <= MAX_TOP_K:
        raise InvalidArgument(
            f"topk_ids: shape is {tuple(topk_ids.shape)}, must be (M, k) with k from 1 to "
            f"{MAX_TOP_K}; flatten the tokens"
        )
    check_sizes(num_experts, expert_map)
    check_same_device(topk_ids=topk_ids, expert_map=expert_map)


def check_sizes(num_experts: int, expert_map: Tensor | None) -> None:
    """Check the number of experts of this rank, and the expert map."""
    if not 0 < num_experts <= MAX_EXPERTS:
        raise InvalidArgument(
            f"num_experts: is {num_experts}, must be from 1 to {MAX_EXPERTS}; count the experts "
            "whose weights this rank holds"
        )
    if expert_map is not None:
        check_dtype("expert_map", expert_map, (torch.int32,))
        if expert_map.ndim != 1:
            raise InvalidArgument(
                f"expert_map: shape is {tuple(expert_map.shape)}, must be (E,); give a row or -1 "
                "for each of all ranks' experts"
            )


def new_routing(
    like: Tensor, slots: Sequence[int], num_experts: int, tile_tokens: int
) -> tuple[Tensor, ...]:
    """Allocate the parts of a routing of ``slots``, M and k, on ``like``'s device."""
    m, k = slots
    tiles = max_tiles(m * k, num_experts, tile_tokens)
    shapes = (1 + tiles,), (tiles, tile_tokens), (m, k)
    return tuple(like.new_empty(shape, dtype=torch.int32) for shape in shapes)


@torch.library.custom_op("nvfp4::moe_route", mutates_args=())
def _moe_route(
    topk_ids: Tensor, expert_map: Tensor | None, num_experts: int, tile_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    check_ids(topk_ids, expert_map, num_experts)
    check_tile_tokens("tile_tokens", tile_tokens)
    kernel = KERNELS.select(topk_ids.device, "float").load()
    return kernel(topk_ids, expert_map, num_experts, tile_tokens)


@_moe_route.register_fake
def _(
    topk_ids: Tensor, expert_map: Tensor | None, num_experts: int, tile_tokens: int
) -> tuple[Tensor, ...]:
    return new_routing(topk_ids, topk_ids.shape, num_experts, tile_tokens)
