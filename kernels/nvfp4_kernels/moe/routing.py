"""Token tiles (padded expert blocks): layout of the rows of a mixture of experts.

Each of M tokens goes to k experts, which gives M · k *slots*; slot ``m · k + j`` is token m's j-th.
Slots of this rank's experts are sorted by expert into tiles of T rows, each tile of one
expert. Inputs and results of the experts' GEMMs have the tile as batch index, ``(tiles, T, …)``,
and each tile has scale atoms of its own, so that a GEMM reads the previous GEMM's result in place.

Ids may be invalid, such as -1 for padding, may belong to other ranks' experts, and may occur twice
in a token.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument, check_dtype, check_shape

TILE_TOKENS = (8, 16, 32, 64, 128, 256)  # rows of a tile


class Routing(NamedTuple):
    """Slots of a batch in token tiles of T rows.

    Tiles are in ascending order of experts, and slots of an expert in ascending order; only an
    expert's last tile has padding. Tensors are sized for the worst case: tiles from ``groups[0]``
    on are not in use, and not read.

    Attributes:
        groups: int32 ``(1 + tiles,)``: the number of tiles in use, then the local expert of each
            tile.
        slots: int32 ``(tiles, T)``: the slot of each row, -1 for padding.
        rows: int32 ``(M, k)``: ``tile · T + row in the tile`` of each slot, -1 for slots without an
            expert of this rank.
    """

    groups: Tensor
    slots: Tensor
    rows: Tensor

    @property
    def tile_tokens(self) -> int:
        """Number of rows per tile, T."""
        return self.slots.shape[1]

    @property
    def top_k(self) -> int:
        """Number of slots per token, k."""
        return self.rows.shape[1]


def max_tiles(slots: int, experts: int, tile_tokens: int) -> int:
    """Maximum number of tiles that ``slots`` slots over ``experts`` experts can fill.

    The formula has no branches on sizes, so that sizes may be symbolic.
    """
    reached = torch.sym_min(slots, experts)
    return (slots + (tile_tokens - 1) * reached) // tile_tokens


def expected_slots(slots: int, experts: int, global_experts: int) -> int:
    """Expected number of slots of this rank's ``experts`` experts, if all are equally likely."""
    return round(slots * min(1.0, experts / max(1, global_experts)))


def tile_tokens_of(tokens: int, top_k: int, experts: int, most: int = TILE_TOKENS[-1]) -> int:
    """Choose the number of rows per tile: enough for the slots of an average expert in use.

    Args:
        tokens: number of tokens, M.
        top_k: number of slots per token.
        experts: number of experts of all ranks.
        most: upper bound on the result.
    """
    reached = experts * (1 - (1 - min(1.0, top_k / experts)) ** tokens)
    each = round(tokens * top_k / reached) if reached else 0
    return next((t for t in TILE_TOKENS if each <= t and t <= most), most)


def check_tile_tokens(name: str, tile_tokens: int) -> None:
    """Raise unless ``tile_tokens`` is a supported number of rows."""
    if tile_tokens not in TILE_TOKENS:
        accepted = ", ".join(map(str, TILE_TOKENS))
        raise InvalidArgument(
            f"{name}: is {tile_tokens}, must be one of {accepted}; take tile_tokens_of()"
        )


def parts_of(routing: Routing) -> tuple[Tensor, Tensor, Tensor]:
    """Return the parts of a routing: groups, slots, rows.

    Raises:
        InvalidArgument: ``routing`` is not a tuple of three.
    """
    if not isinstance(routing, tuple) or len(routing) != 3:
        raise InvalidArgument(
            f"routing: is {type(routing).__name__}, must be a Routing; make it with moe_route()"
        )
    return routing


def check_routing(routing: Routing) -> None:
    """Raise unless a routing's tensors have valid dtypes, and shapes that fit together."""
    groups, slots, rows = routing
    for name, part, dims in (("groups", groups, 1), ("slots", slots, 2), ("rows", rows, 2)):
        check_dtype(f"routing.{name}", part, (torch.int32,))
        if part.ndim != dims:
            raise InvalidArgument(
                f"routing.{name}: shape is {tuple(part.shape)}, must have {dims} dimensions; "
                "make it with moe_route()"
            )
    check_tile_tokens("routing.slots: T", slots.shape[1])
    check_groups("routing.groups", groups, slots.shape[0])


def check_used(name: str, groups: Tensor, experts: int | None = None) -> int:
    """Raise unless the number of tiles in use and the experts of these tiles are valid.

    Waits for the device.

    Args:
        name: name of the argument, for error messages.
        groups: ``Routing.groups``.
        experts: number of this rank's experts; None: experts are not checked.

    Returns:
        The number of tiles in use.
    """
    used, tiles = int(groups[0]), len(groups) - 1
    if not 0 <= used <= tiles:
        raise InvalidArgument(
            f"{name}: says that {used} tiles are in use, must be from 0 to {tiles}, the tiles "
            "there are; make it with moe_route()"
        )
    given = groups[1 : 1 + used]
    wrong = given[(given < 0) | (given >= experts)] if experts is not None else given[:0]
    if wrong.numel():
        raise InvalidArgument(
            f"{name}: holds expert {wrong[0]}, must be a row of the weights, below "
            f"{experts}; make it with moe_route()"
        )
    return used


def check_slots(routing: Routing) -> None:
    """Raise unless tiles in use hold only -1 and slots of the batch. Waits for the device."""
    slots = routing.slots[: check_used("routing.groups", routing.groups)]
    wrong = slots[(slots < -1) | (slots >= routing.rows.numel())]
    if wrong.numel():
        raise InvalidArgument(
            f"routing.slots: holds {wrong[0]}, must be from -1 to {routing.rows.numel() - 1}, the "
            "slots of routing.rows; make it with moe_route()"
        )


def check_groups(name: str, groups: Tensor, tiles: int) -> None:
    """Raise unless ``groups`` is int32 and has the shape for ``tiles`` tiles."""
    check_dtype(name, groups, (torch.int32,))
    check_shape(name, groups, (1 + tiles,), "the count, then an expert per tile, of moe_route()")
