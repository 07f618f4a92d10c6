"""Argument checks of ``moe_dispatch``."""

import torch
from torch import Tensor

from nvfp4_kernels.checks import (
    InvalidArgument,
    check_blocks_of_16,
    check_dtype,
    check_same_device,
    check_shape,
)
from nvfp4_kernels.devices import is_reference_device
from nvfp4_kernels.formats.output import (
    PerToken,
    Static,
    StaticFp8,
    check_static,
    check_static_fp8,
)
from nvfp4_kernels.formats.terms import check_terms
from nvfp4_kernels.moe.dispatch.call import DispatchCall, Ids, Logits
from nvfp4_kernels.moe.route.op import check_ids, check_sizes
from nvfp4_kernels.moe.router import check_router
from nvfp4_kernels.moe.routing import Routing, check_routing, check_slots, check_tile_tokens

DTYPES = (torch.bfloat16, torch.float16)


def check(call: DispatchCall) -> None:
    """Check the arguments of ``moe_dispatch``.

    Raises:
        InvalidArgument: an unsupported dtype, shape or number; the message names it.
    """
    x, source, output, _ = call
    if isinstance(source, Routing):
        check_routing(source)
    elif isinstance(source, Ids):
        check_ids(source.topk_ids, source.expert_map, source.num_experts)
        check_tile_tokens("tile_tokens", source.tile_tokens)
    else:
        _check_logits(source)
    check_dtype("x", x, DTYPES)
    if isinstance(source, Routing):
        _check_tokens(x, source, output is None)
    else:
        if x.ndim != 2:
            raise InvalidArgument(
                f"x: shape is {tuple(x.shape)}, must be (M, K); rows that lie in tiles are routed"
            )
        check_blocks_of_16("x", x.shape)
        name = "logits" if isinstance(source, Logits) else "topk_ids"
        check_shape("x", x, (call.slots[0], x.shape[1]), f"a row for each of {name}")
        check_same_device(x=x, **{name: source[0]}, expert_map=source.expert_map)
    _check_weights(call)
    if isinstance(output, Static):
        check_static(output)
        check_same_device(x=x, **{"output.global_scale": output.global_scale})
    elif isinstance(output, StaticFp8):
        check_static_fp8(output)
        check_same_device(x=x, **{"output.scale": output.scale})
    elif isinstance(output, PerToken):
        check_terms("output.terms", output.terms)
    if x.shape[-1] == 0:
        raise InvalidArgument("x: K is 0, must be positive; leave empty layers out")
    if isinstance(source, Routing) and is_reference_device(x.device):
        check_slots(source)


def _check_logits(source: Logits) -> None:
    logits, expert_map = source.logits, source.expert_map
    check_router(source.router, logits, source.bias, source.padding)
    check_sizes(source.num_experts, expert_map)
    check_tile_tokens("tile_tokens", source.tile_tokens)
    experts = source.num_experts if expert_map is None else len(expert_map)
    check_shape("logits", logits, (logits.shape[0], experts), "one for each of all ranks' experts")


def _check_tokens(x: Tensor, routing: Routing, copies: bool) -> None:
    """Raise unless ``x`` fits the routing: tokens or, unless ``copies``, rows in tiles."""
    check_blocks_of_16("x", x.shape)
    rows = routing.rows.shape[:1] if x.ndim == 2 else routing.slots.shape
    check_shape("x", x, (*rows, x.shape[-1]), "(M, K), or (tiles, T, K), of this routing")
    if copies and x.ndim != 2:
        raise InvalidArgument(
            f"x: shape is {tuple(x.shape)}, must be (M, K); rows that lie in tiles need no copy"
        )
    check_same_device(x=x, **{f"routing.{n}": t for n, t in routing._asdict().items()})


def _check_weights(call: DispatchCall) -> None:
    weights = call.topk_weights
    if weights is None:
        return
    check_dtype("topk_weights", weights, (torch.float32,))
    check_shape("topk_weights", weights, call.slots, "one weight for each slot")
    check_same_device(x=call.x, topk_weights=weights)
    if call.x.ndim == 3:
        raise InvalidArgument(
            "topk_weights: given with rows that lie in tiles, must be None; weigh the tokens "
            "before the first product or the slots after the second"
        )
