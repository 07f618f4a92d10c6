"""``moe_quantize`` and its siblings in torch: the formula, and the kernel on CPU."""

from torch import Tensor

from nvfp4_kernels.formats.nvfp4 import row_global_scales
from nvfp4_kernels.formats.terms import quantize_terms
from nvfp4_kernels.moe.routing import Routing


def moe_quantize(
    x: Tensor, routing: Routing, global_scale: Tensor, topk_weights: Tensor | None, terms: int
) -> tuple[Tensor, Tensor]:
    """See ``nvfp4_kernels.moe.quantize.op.moe_quantize``; spare tiles are zeros."""
    return quantize_terms(moe_gather(x, routing, topk_weights), global_scale, terms)


def moe_quantize_per_token(
    x: Tensor, routing: Routing, topk_weights: Tensor | None, terms: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``nvfp4_kernels.moe.quantize.op.moe_quantize_per_token``."""
    rows = moe_gather(x, routing, topk_weights)
    row_scale = row_global_scales(rows)
    return (*quantize_terms(rows, row_scale, terms), row_scale)


def moe_gather(x: Tensor, routing: Routing, topk_weights: Tensor | None) -> Tensor:
    """See ``nvfp4_kernels.moe.quantize.op.moe_gather``; rows already in tiles stay there."""
    used = int(routing.groups[0])
    slots = routing.slots[:used].long()
    is_slot = slots >= 0
    out = x.new_zeros((*routing.slots.shape, x.shape[-1]))
    if x.ndim == 3:
        out[:used][is_slot] = x[:used][is_slot]
        return out
    values = x[slots[is_slot] // routing.top_k]
    if topk_weights is not None:
        factors = topk_weights.flatten()[slots[is_slot]].unsqueeze(1)
        values = (values.float() * factors).to(x.dtype)
    out[:used][is_slot] = values
    return out
