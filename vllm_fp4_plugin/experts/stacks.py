"""Separation of projections and experts that a checkpoint stacks in one tensor.

Llama 4 stacks all experts, with gate above up. vLLM passes the loaded tensor transposed to ``(E,
rows, columns)``: weights of gate and of up apart, for this rank's experts only, but scales of both
together, for all experts. gpt-oss interleaves the rows of gate and up, gate first; vLLM passes its
tensors expert by expert.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

GATE, UP, DOWN = "w1", "w3", "w2"  # vLLM's names of an expert's projections
ALTERNATING, DOWN_OF_GPT_OSS = "gpt_oss_w13", "gpt_oss_w2"  # vLLM's names of gpt-oss's projections


class Part(NamedTuple):
    """Tensor of one projection of one expert.

    Attributes:
        tensor: ``(rows, columns)``, or a scalar.
        shard: ``"w1"``, ``"w2"`` or ``"w3"``.
        expert: index of the expert over all ranks.
    """

    tensor: Tensor
    shard: str
    expert: int


def apart(
    loaded: Tensor,
    shard: str,
    expert: int,
    *,
    is_number: bool,
    rows: int,
    shards: Sequence[str],
    held: Sequence[int],
    count: int,
) -> Iterator[Part]:
    """Split a tensor that vLLM loads into one tensor per projection and expert.

    Args:
        loaded: tensor as read, of one expert, or of several experts stacked in the first dimension.
        shard: projection that the tensor holds; for gate and up together, ``GATE``, or
            ``ALTERNATING`` if their rows alternate.
        expert: index of a single expert; unused for a stack, whose length tells the experts.
        is_number: whether the tensor of one expert is a scalar.
        rows: number of rows of gate's whole weight, before it is split over ranks.
        shards: projections before the activation: gate and up or, without a gate, ``"w1"``.
        held: indices of this rank's experts, in row order.
        count: number of experts of all ranks.
    """
    if shard in (ALTERNATING, DOWN_OF_GPT_OSS):
        yield from _of_gpt_oss(loaded, shard, expert, is_number=is_number)
        return
    of_one = loaded.numel() == 1 if is_number else loaded.ndim < 3
    if of_one or loaded.shape[0] not in (count, len(held)):
        yield Part(loaded, shard, expert)  # a stack that does not fit is refused by name later
        return
    experts = range(count) if loaded.shape[0] == count else held
    both = shard == GATE and len(shards) > 1 and (is_number or loaded.shape[1] == 2 * rows)
    for number, each in zip(experts, loaded, strict=True):
        if not both:
            yield Part(each, shard, number)
        elif is_number:
            yield from (Part(each, of, number) for of in shards)
        else:
            halves = each.chunk(2)
            yield from (Part(half, of, number) for half, of in zip(halves, shards, strict=True))


def _of_gpt_oss(loaded: Tensor, shard: str, expert: int, *, is_number: bool) -> Iterator[Part]:
    if shard == DOWN_OF_GPT_OSS:
        yield Part(loaded, DOWN, expert)
        return
    for row, of in enumerate((GATE, UP)):
        yield Part(loaded if is_number else loaded[row::2], of, expert)


def copy_part(
    place: Tensor, loaded: Tensor, shard: str, shards: Sequence[str], config: Any
) -> None:
    """Copy this rank's part of one expert's tensor into the expert's parameter.

    Args:
        place: the expert's row of the parameter; of ``w13``, ``(S, …)`` with S = ``len(shards)``.
        loaded: unsharded weight, scales or bias of one projection, or a scalar.
        shard: the projection.
        shards: projections before the activation.
        config: vLLM's MoE config of the layer.
    """
    if shard != DOWN:
        place = place[shards.index(shard)]
    if place.ndim == 0:
        place.copy_(loaded.reshape(()))
        return
    if shard == DOWN and place.ndim == 1:  # down's bias: rank 0 adds it, before the all-reduce
        place.copy_(loaded if config.tp_rank == 0 else torch.zeros_like(loaded))
        return
    dim = 1 if shard == DOWN else 0
    size = place.shape[dim]
    place.copy_(loaded.narrow(dim, config.tp_rank * size, size))
