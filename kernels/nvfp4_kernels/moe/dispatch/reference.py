"""``moe_dispatch`` in torch: the reference, which is also the CPU kernel."""

from torch import Tensor

from nvfp4_kernels.formats.fp8_rows import quantize_fp8, token_scales
from nvfp4_kernels.formats.nvfp4 import row_global_scales
from nvfp4_kernels.formats.output import PerToken, PerTokenFp8, StaticFp8
from nvfp4_kernels.formats.terms import quantize_terms
from nvfp4_kernels.moe.dispatch.call import DispatchCall, Dispatched, Ids, Logits
from nvfp4_kernels.moe.route.reference import moe_route
from nvfp4_kernels.moe.routing import Routing
from nvfp4_kernels.moe.topk.reference import moe_topk


def moe_dispatch(call: DispatchCall) -> Dispatched:
    """See ``nvfp4_kernels.moe.dispatch.op.moe_dispatch``; tiles that are not in use are zeros."""
    x, source, output, factors = call
    weights = row_scale = None
    if isinstance(source, Logits):
        weights, ids = moe_topk(source.logits, source.bias, source.padding, source.router)
        source = Ids(ids, source.num_experts, source.tile_tokens, source.expert_map)
    if isinstance(source, Ids):
        ids, experts, tile_tokens, expert_map = source
        source = Routing(*moe_route(ids, expert_map, experts, tile_tokens))
    rows = _gathered(x, source, factors)
    if output is None:
        return Dispatched(rows, None, None, source, weights)
    if isinstance(output, StaticFp8):
        return Dispatched(quantize_fp8(rows, output.scale), None, None, source, weights)
    if isinstance(output, PerTokenFp8):
        row_scale = token_scales(rows)
        return Dispatched(quantize_fp8(rows, row_scale), None, row_scale, source, weights)
    if isinstance(output, PerToken):
        scale = row_scale = row_global_scales(rows)
    else:
        scale = output.global_scale
    data, scales = quantize_terms(rows, scale, output.terms)
    return Dispatched(data, scales, row_scale, source, weights)


def _gathered(x: Tensor, routing: Routing, topk_weights: Tensor | None) -> Tensor:
    """Gather tokens into tiles, or copy rows already in tiles; all other rows are zeros."""
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
