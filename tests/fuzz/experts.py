"""Ops of a mixture of experts: dispatch to padded expert blocks, grouped GEMMs, and combine."""

from functools import partial
from typing import Any

import torch

from nvfp4_kernels.activation import GATED, SILU, UNGATED, Activation
from nvfp4_kernels.formats.output import Static
from nvfp4_kernels.moe.route import reference
from nvfp4_kernels.moe.routing import TILE_TOKENS, Routing
from tests.fuzz.bounds import near, quantized, require, row_there, same
from tests.fuzz.draw import BF16, FP16, FP32, Draw
from tests.fuzz.ops import Given, Op
from tests.fuzz.products import (
    activated,
    activation_values,
    draw_activation,
    draw_factors,
    draw_quantizes,
    draw_weight,
    product,
    weight_values,
)
from tests.test_kernels.oracle import float64
from tests.test_kernels.routing_cases import check_routing

INT32 = torch.int32


# --- drawing --------------------------------------------------------------------------------------


def draw_batch(draw: Draw) -> Given:
    """Expert ids, some invalid, of other ranks or repeated; optionally with an expert map."""
    tokens, top_k = draw.number(0, 12 if draw.gpu else 40), draw.one(1, 2, 3, 8, 32)
    experts, tiles = draw.number(1, 12), draw.one(8, 8, 16, *TILE_TOKENS)
    if draw.gpu:
        top_k, tiles = min(top_k, 3), draw.one(8, 16, 32)
    expert_map, total = None, experts
    if draw.chance(0.4):
        total = experts + draw.number(0, 20)
        expert_map = torch.full((total,), -1, dtype=INT32)
        held = draw.rng.permutation(total)[:experts]
        expert_map[torch.from_numpy(held)] = torch.arange(experts, dtype=INT32)
    low, high = draw.one((0, total), (-1, total + 1), (0, 1), (-1, 0))
    ids = draw.integers(low, high, (tokens, top_k), INT32)
    if draw.chance(0.2):
        ids[torch.from_numpy(draw.rng.random(ids.shape) < 0.2)] = draw.one(2**31 - 1, -(2**31))
    return {
        "topk_ids": ids, "num_experts": experts, "tile_tokens": tiles, "expert_map": expert_map
    }  # fmt: skip


def routed(batch: Given) -> Routing:
    """Routing of a batch by the reference op, which is fuzzed separately."""
    ids, experts, tiles, expert_map = (
        batch[n] for n in ("topk_ids", "num_experts", "tile_tokens", "expert_map")
    )
    return Routing(*reference.moe_route(ids, expert_map, experts, tiles))


def draw_grouped(draw: Draw, gated: bool) -> Given:
    quantizes = draw_quantizes(draw)
    batch = draw_batch(draw)
    experts, routing = batch["num_experts"], routed(batch)
    n, k = draw.number(1, 60), 16 * draw.number(1, 8)
    if quantizes or draw.gpu:
        n = 16 * draw.number(1, 5)
    if draw.gpu:
        k = 32 * draw.number(1, 3)
    a16 = not draw.gpu and draw.chance(0.3)
    terms = 1 if a16 else draw.one(1, 1, 2, 3)
    a, a_scales = draw_activation(draw, *routing.slots.shape, k, a16=a16, terms=terms)
    matrices = (experts, 2) if gated else (experts,)
    fragments = a16 and not quantizes and draw.chance(0.5)
    b, b_scales = draw_weight(draw, matrices, n, k, fragments)
    given: Given = {
        "a": a, "a_scales": a_scales, "groups": routing.groups, "b": b, "b_scales": b_scales,
        "alpha": draw_factors(draw, *matrices), "row_scale": None, "bias": None,
        "activation": _gated(draw) if gated else _ungated(draw), "terms": terms,
    }  # fmt: skip
    if not a16 and draw.chance(0.4):
        rows = draw.rng.uniform(0.1, 3.0, routing.slots.shape)
        given["row_scale"] = torch.from_numpy(rows).float()
    if draw.chance(0.4):
        given["bias"] = draw.floats((*matrices, n), draw.one(BF16, FP16, FP32), 2)
    if quantizes or (draw.gpu and draw.chance(0.4)):
        scales = torch.from_numpy(0.01 * 2.0 ** draw.rng.uniform(-4, 4, (experts,))).float()
        return given | {"output": Static(scales, draw.one(1, 1, 2, 3))}
    if fragments or draw.chance(0.2):
        given["n"] = n
    return given | {"out_dtype": draw.one(BF16, FP16, FP32)}


def _gated(draw: Draw) -> Activation:
    name = draw.one("silu", *GATED)
    limit = draw.one(7.0, 0.5) if name == "swiglustep" or draw.chance(0.5) else None
    alpha = draw.one(1.0, 1.702, 3.0) if name in ("swigluoai_uninterleave", "situ") else 1.0
    return Activation(name, limit, alpha, 1.0 if name == "swigluoai_uninterleave" else 0.0)


def _ungated(draw: Draw) -> Activation | None:
    return Activation(draw.one(*UNGATED)) if draw.chance(0.5) else None


def draw_combine(draw: Draw) -> Given:
    batch = draw_batch(draw)
    routing = routed(batch)
    width = draw.number(1, 70) * (8 if draw.gpu else 1)
    y = draw.floats((*routing.slots.shape, width), draw.one(BF16, FP16, FP32), 2)
    weights = draw.floats(routing.rows.shape, FP32, 1) if draw.chance(0.7) else None
    if weights is not None and draw.chance(0.3):
        weights[routing.rows < 0] = torch.nan
    return {
        "y": y if draw.gpu else draw.strided(y), "rows": routing.rows, "topk_weights": weights,
        "out_dtype": draw.one(BF16, FP16, FP32),
    }  # fmt: skip


# --- the formula ----------------------------------------------------------------------------------


def check_route(given: Given, result: Any, after: Given) -> None:
    arguments = (given[n] for n in ("topk_ids", "expert_map", "num_experts", "tile_tokens"))
    check_routing(result, *arguments)


def check_grouped(given: Given, result: Any, after: Given) -> None:
    groups, b, terms = given["groups"], given["b"], given["terms"]
    gated, used = given["alpha"].ndim == 2, int(groups[0])
    require(0 <= used <= len(groups) - 1, "groups: has more tiles than there are")
    n = given.get("n") or b.shape[-2]
    for tile in range(used):
        expert, scales = int(groups[1 + tile]), given["a_scales"]
        row_there("groups", b, expert)
        one = None if scales is None else scales[tile]
        a = activation_values(given["a"][tile], one, terms)
        weights = weight_values(b[expert], given["b_scales"][expert], n, a.shape[-1])
        rows = None if given["row_scale"] is None else given["row_scale"][tile]
        values = []
        for index, weight in enumerate(weights if gated else weights[None]):
            factor = float64(given["alpha"][expert]).reshape(-1)[index]
            bias = None if given["bias"] is None else given["bias"][expert].view(-1, n)[index]
            values.append(product(a, weight, factor, rows, bias, terms * a.shape[-1]))
        both = values[0], values[1] if gated else None
        value, error = activated(*both, given.get("activation", SILU if gated else None))
        if given.get("output") is None:
            near(f"tile {tile}", result[tile], value, error)
            continue
        (scales, out_terms), parts = given["output"], (x[tile] for x in result)
        quantized(*parts, value - error, value + error, scales[expert], out_terms)


def check_combine(given: Given, result: Any, after: Given) -> None:
    y, rows, weights = given["y"].flatten(0, 1), given["rows"], given["topk_weights"]
    out = torch.zeros((len(rows), y.shape[-1]))
    for token, places in enumerate(rows.tolist()):
        for slot, row in enumerate(places):
            if row >= 0:
                value = row_there("rows", y, row).float()
                out[token] += value if weights is None else value * weights[token, slot]
    same("out", result, out.to(given["out_dtype"]))


def _grouped(gated: bool) -> Op:
    return Op(partial(draw_grouped, gated=gated), check_grouped)


OPS = {
    "moe_route": Op(draw_batch, check_route),
    "grouped_gemm": _grouped(gated=False),
    "grouped_silu_mul_gemm": _grouped(gated=True),
    "moe_combine": Op(draw_combine, check_combine),
}
