"""Batches of a mixture of experts, and the token tiles expected from routing."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4_kernels.moe.route import reference
from nvfp4_kernels.moe.routing import Routing


@dataclass(frozen=True)
class RoutingCase:
    """A batch of ``tokens`` whose slots go to ``ids``.

    Attributes:
        ids: experts of the slots: ``"random"``; ``"one"``: the same expert for all; ``"each"``: all
            experts in turn; ``"none"``: padding only; ``"hostile"``: also invalid and repeated ids.
        total: number of experts of all ranks; 0: ``experts``, without a map.
        linear: whether this rank, if there is a map, holds contiguous experts, not every n-th.
    """

    tokens: int
    top_k: int
    experts: int
    tile_tokens: int = 8
    ids: str = "random"
    total: int = 0
    linear: bool = True

    def expert_map(self) -> Tensor | None:
        if not self.total:
            return None
        mapped = torch.full((self.total,), -1, dtype=torch.int32)
        step = 1 if self.linear else self.total // self.experts
        first = self.experts if self.linear else 1
        held = first + step * torch.arange(self.experts)
        mapped[held % self.total] = torch.arange(self.experts, dtype=torch.int32)
        return mapped

    def topk_ids(self) -> Tensor:
        shape, total = (self.tokens, self.top_k), self.total or self.experts
        if self.ids == "none":
            return torch.full(shape, -1, dtype=torch.int32)
        if self.ids == "one":
            return torch.full(shape, total // 2, dtype=torch.int32)
        if self.ids == "each":
            return torch.arange(self.tokens * self.top_k).view(shape).remainder(total).int()
        if self.ids == "hostile":
            ids = torch.randint(-1, total + 1, shape, dtype=torch.int32)
            ids[torch.rand(shape) < 0.1] = 2**31 - 1
            ids[torch.rand(shape) < 0.1] = -(2**31)
            ids[: self.tokens // 2] = ids[: self.tokens // 2, :1]
            return ids
        chosen = [torch.randperm(total)[: self.top_k] for _ in range(self.tokens)]
        return torch.stack(chosen).int() if chosen else torch.empty(shape, dtype=torch.int32)

    def routing(self, ids: Tensor) -> Routing:
        """The reference's routing, on the device of the ops."""
        arguments = ids, self.expert_map(), self.experts, self.tile_tokens
        return Routing(*reference.moe_route(*arguments))


CASES = {
    "one token": RoutingCase(1, 2, 8),
    "no token": RoutingCase(0, 2, 8),
    "nothing routed": RoutingCase(5, 2, 4, ids="none"),
    "all to one expert": RoutingCase(21, 2, 8, ids="one"),
    "an expert per token": RoutingCase(8, 1, 8, ids="each"),
    "one expert": RoutingCase(17, 1, 1),
    "ids of no expert": RoutingCase(40, 4, 6, ids="hostile"),
    "128 experts": RoutingCase(33, 8, 128, ids="random"),
    "384 experts": RoutingCase(19, 8, 384),
    "linear map": RoutingCase(30, 4, 8, total=32),
    "round-robin map": RoutingCase(30, 4, 8, total=32, linear=False, ids="hostile"),
    "none of this rank": RoutingCase(6, 1, 4, total=16, ids="each"),
    **{f"tiles of {t}": RoutingCase(70, 4, 3 if t > 32 else 8, t) for t in (16, 32, 64, 128, 256)},
    "full tiles": RoutingCase(32, 1, 4, ids="each"),
    "one more than full": RoutingCase(33, 1, 4, ids="each"),
    "one less than full": RoutingCase(31, 1, 4, ids="each"),
}

# Cases that differ for kernels that get a routing.
_KINDS = "no token", "nothing routed", "ids of no expert", "round-robin map"
_SIZES = (16, 32, 64, 256)
KINDS = {name: CASES[name] for name in (*_KINDS, *(f"tiles of {t}" for t in _SIZES))}


def expected_routing(
    ids: Tensor, expert_map: Tensor | None, experts: int, tile_tokens: int
) -> tuple[list[int], list[list[int]], list[list[int]]]:
    """Experts and slots of the tiles in use, and rows of all slots, computed slot by slot."""
    queues: dict[int, list[int]] = {expert: [] for expert in range(experts)}
    for slot, number in enumerate(ids.flatten().tolist()):
        row = number
        if expert_map is not None:
            row = int(expert_map[number]) if 0 <= number < len(expert_map) else -1
        if 0 <= row < experts:
            queues[row].append(slot)
    groups: list[int] = []
    slots: list[list[int]] = []
    rows = [-1] * ids.numel()
    for expert, queue in queues.items():
        for start in range(0, len(queue), tile_tokens):
            tile = queue[start : start + tile_tokens]
            for place, slot in enumerate(tile):
                rows[slot] = len(groups) * tile_tokens + place
            groups.append(expert)
            slots.append(tile + [-1] * (tile_tokens - len(tile)))
    top_k = ids.shape[1]
    return groups, slots, [rows[at : at + top_k] for at in range(0, len(rows), top_k)]


def check_routing(
    routing: Routing, ids: Tensor, expert_map: Tensor | None, experts: int, tile_tokens: int
) -> None:
    """Check the tiles in use; other tiles may hold anything."""
    groups, slots, rows = expected_routing(ids, expert_map, experts, tile_tokens)
    used = len(groups)
    assert used <= routing.slots.shape[0]
    assert routing.groups[: 1 + used].tolist() == [used, *groups]
    assert routing.slots[:used].tolist() == slots
    assert routing.rows.tolist() == rows
