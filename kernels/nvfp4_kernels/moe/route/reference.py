"""``moe_route`` in torch: the reference, which is also the CPU kernel."""

import torch
from torch import Tensor

from nvfp4_kernels.moe.routing import max_tiles


def moe_route(
    topk_ids: Tensor, expert_map: Tensor | None, num_experts: int, tile_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``nvfp4_kernels.moe.route.op.moe_route``; tiles that are not in use hold -1."""
    experts = _local_rows(topk_ids, expert_map, num_experts).flatten()
    tiles = max_tiles(experts.numel(), num_experts, tile_tokens)
    order = experts.argsort(stable=True)  # of no expert: last
    counts = experts.bincount(minlength=num_experts + 1)[:num_experts]
    ends = counts.cumsum(0)
    tile_ends = (-(-counts // tile_tokens)).cumsum(0)

    order = order[: int(ends[-1])]
    sorted_experts = experts[order]
    within = torch.arange(len(order), device=order.device) - (ends - counts)[sorted_experts]
    first_tiles = tile_ends - -(-counts // tile_tokens)
    rows = first_tiles[sorted_experts] * tile_tokens + within

    slots = topk_ids.new_full((tiles * tile_tokens,), -1)
    slots[rows] = order.int()
    row_of = torch.full_like(experts, -1, dtype=torch.int32)
    row_of[order] = rows.int()
    groups = topk_ids.new_full((1 + tiles,), -1)
    used = int(tile_ends[-1])
    groups[0] = used
    numbers = torch.arange(used, device=order.device)
    groups[1 : 1 + used] = torch.searchsorted(tile_ends, numbers, right=True).int()
    return groups, slots.view(tiles, tile_tokens), row_of.view(topk_ids.shape)


def _local_rows(topk_ids: Tensor, expert_map: Tensor | None, num_experts: int) -> Tensor:
    """Local expert of each slot, int64; ``num_experts`` if the expert is not of this rank."""
    rows = topk_ids.long()
    if expert_map is not None:
        known = (rows >= 0) & (rows < len(expert_map))
        padded = torch.nn.functional.pad(expert_map.long(), (0, 1), value=-1)
        rows = padded[torch.where(known, rows, len(expert_map))]
    return torch.where((rows >= 0) & (rows < num_experts), rows, num_experts)
