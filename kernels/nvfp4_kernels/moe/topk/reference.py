"""``moe_topk`` in torch: the reference, which is also the CPU kernel."""

import math

import torch
from torch import Tensor

from nvfp4_kernels.moe.router import Router

NOT_ZERO = 1e-20  # added to a sum of sigmoids, which may all be zero


def moe_topk(
    logits: Tensor, bias: Tensor | None, padding: Tensor | None, router: Router
) -> tuple[Tensor, Tensor]:
    """See ``nvfp4_kernels.moe.topk.op.moe_topk``."""
    x = logits.float()
    scores = x.sigmoid() if router.scoring == "sigmoid" else x.softmax(-1)
    order = x if bias is None else scores + bias
    if router.groups > 1:
        order = order.masked_fill(~_in_best_groups(order, router, bias is not None), -math.inf)
    ids = _descending(order, router.top_k)
    weights = scores.gather(1, ids)
    if router.renormalize and router.scoring == "softmax":
        weights = x.gather(1, ids).softmax(-1)
    elif router.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + NOT_ZERO)
    weights, ids = weights * router.scale, ids.int()
    if padding is not None:
        ids = ids.masked_fill(padding[:, None], -1)
        weights = weights.masked_fill(padding[:, None], 0.0)
    return weights, ids


def _in_best_groups(order: Tensor, router: Router, biased: bool) -> Tensor:
    """Whether each expert belongs to one of the token's best groups."""
    groups = order.unflatten(1, (router.groups, -1))
    best = groups.sort(dim=-1, descending=True).values
    of_group = best[..., :2].sum(-1) if biased else best[..., 0]
    chosen = _descending(of_group, router.top_groups)
    inside = torch.zeros_like(of_group, dtype=torch.bool).scatter_(1, chosen, True)
    return inside[..., None].expand_as(groups).flatten(1)


def _descending(values: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` largest values per row, descending; ties go to the lower index."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]
