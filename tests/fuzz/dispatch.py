"""Dispatch of tokens to padded expert blocks: from a routing, expert ids or router logits."""

from typing import Any

import torch
from torch import Tensor

from nvfp4_kernels.formats.output import Output, PerToken, Static
from nvfp4_kernels.moe.dispatch.call import Ids, Logits
from nvfp4_kernels.moe.routing import Routing
from tests.fuzz.bounds import quantized, require, row_scales, row_there, same
from tests.fuzz.draw import BF16, FP16, FP32, Draw
from tests.fuzz.experts import draw_batch, routed
from tests.fuzz.ops import Given, Op
from tests.fuzz.routers import chosen, draw_route
from tests.test_kernels.oracle import float64
from tests.test_kernels.routing_cases import check_routing

# --- drawing --------------------------------------------------------------------------------------


def draw_dispatch(draw: Draw) -> Given:
    """Tokens, a source of any kind and a format of the result."""
    output = draw_output(draw)
    if draw.chance(0.33):
        x, source = draw_route(draw)
        return {"x": x, "source": source, "output": output, "topk_weights": None}
    batch = draw_batch(draw)
    ids, k = batch["topk_ids"], 16 * draw.number(1, 4 if draw.gpu else 12)
    x = draw.floats((len(ids), k), draw.one(BF16, FP16), 3)
    weighted = draw.chance(0.3)
    given: Given = {"source": Ids(**batch) if draw.chance(0.5) else routed(batch)}
    in_tiles = isinstance(given["source"], Routing) and output is not None and draw.chance(0.2)
    if in_tiles:
        x, weighted = draw.floats((*given["source"].slots.shape, k), x.dtype, 3), False
    given["x"] = x if draw.gpu else draw.strided(x)
    given["topk_weights"] = draw.floats(ids.shape, FP32, 1) if weighted else None
    return given | {"output": output}


def draw_output(draw: Draw) -> Output:
    terms = draw.one(1, 1, 2, 3, 4)
    return draw.one(None, PerToken(terms), Static(draw.scalar(0.003), terms))


# --- the formula ----------------------------------------------------------------------------------


def tiles_of(x: Tensor, routing: Routing, topk_weights: Tensor | None) -> Tensor:
    """The rows of the used tiles, with zero padding: ``(used, T, K)``."""
    used = int(routing.groups[0])
    slots = routing.slots[:used]
    if x.ndim == 3:
        return torch.where((slots >= 0).unsqueeze(-1), x[:used], torch.zeros((), dtype=x.dtype))
    out = torch.zeros((*slots.shape, x.shape[-1]), dtype=x.dtype)
    for tile, row in (slots >= 0).nonzero().tolist():
        slot = int(slots[tile, row])
        token, place = divmod(slot, routing.top_k)
        values = row_there("routing.slots", x, token).float()
        if topk_weights is not None:
            values = values * topk_weights[token, place]
        out[tile, row] = values.to(x.dtype)
    return out


def check_dispatch(given: Given, result: Any, after: Given) -> None:
    source, output = given["source"], given["output"]
    data, scales, row_scale, routing, weights = result
    if isinstance(source, Logits):
        source = chosen(source, weights)
    else:
        require(weights is None, "topk_weights: of no logits")
    if isinstance(source, Ids):
        ids, experts, tiles, expert_map = source
        check_routing(routing, ids, expert_map, experts, tiles)
    expected = tiles_of(given["x"], routing, given["topk_weights"])
    used = len(expected)
    if output is None:
        require(scales is None, "scales: of no NVFP4")
        same("data", data[:used], expected)
        return
    values, scale = float64(expected), None
    if isinstance(output, PerToken):
        scale = row_scale[:used]
        row_scales(scale, values, values)
    else:
        require(row_scale is None, "row_scale: of one global scale")
        scale = output.global_scale
    quantized(data[:used], scales[:used], values, values, scale, output.terms)


OPS = {"moe_dispatch": Op(draw_dispatch, check_dispatch)}
