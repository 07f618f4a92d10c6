"""Routers: top-k experts from logits."""

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nvfp4_kernels.moe.dispatch.call import Ids, Logits
from nvfp4_kernels.moe.router import LOGITS, Router
from nvfp4_kernels.moe.routing import TILE_TOKENS
from nvfp4_kernels.moe.topk.reference import NOT_ZERO, moe_topk
from tests.fuzz.bounds import near, require, within
from tests.fuzz.draw import BF16, FP16, FP32, Draw
from tests.fuzz.ops import Given, Op
from tests.test_kernels.oracle import Float64, float64

# Relative error of a score: float32's exponential, sum and division; of a kernel's, approximated.
ERROR = 2.0**-17


# --- drawing --------------------------------------------------------------------------------------


def draw_router(draw: Draw, experts: int, biased: bool) -> Router:
    """Routing rule that suits the number of experts."""
    least = 2 if biased else 1
    divisors = [n for n in range(1, 33) if experts % n == 0 and experts // n >= least]
    groups = draw.one(1, *divisors) if divisors else 1
    top_groups = draw.number(1, groups)
    most = min(32, experts // groups * top_groups, 6 if draw.gpu else 32)
    scoring, scale = draw.one("softmax", "sigmoid"), draw.one(1.0, 2.5, 0.5)
    return Router(
        draw.number(1, most),
        scoring,
        draw.chance(0.6),
        groups,
        top_groups,
        scale,  # type: ignore[arg-type]
    )


def draw_logits(draw: Draw, biased: bool) -> Given:
    """Random logits with ties; with a bias, multiples of 1/4: unequal sums differ clearly."""
    experts = draw.one(1, 2, draw.number(1, 24), 16 * draw.number(1, 8), 64)
    tokens = draw.number(0, 6 if draw.gpu else 20)
    shape, dtype = (tokens, experts), draw.one(*LOGITS)
    if biased or draw.chance(0.4):
        logits = draw.integers(-12, 13, shape, torch.int64).to(dtype) / 4
    else:
        logits = draw.floats(shape, dtype, 2)
    if not biased:
        logits = draw.extremes(logits)
    bias = draw.integers(-8, 9, (experts,), torch.int64).float() / 8 if biased else None
    padding = torch.from_numpy(draw.rng.random(tokens) < 0.3) if draw.chance(0.3) else None
    return {"logits": logits, "bias": bias, "padding": padding}


def draw_topk(draw: Draw) -> Given:
    biased = draw.chance(0.4)
    given = draw_logits(draw, biased)
    if not draw.gpu:
        given["logits"] = draw.strided(given["logits"])
    return given | {"router": draw_router(draw, given["logits"].shape[1], biased)}


def draw_route(draw: Draw) -> tuple[Tensor, Logits]:
    """Tokens and their logits."""
    biased = draw.chance(0.4)
    given = draw_logits(draw, biased)
    tokens, total = given["logits"].shape
    held, expert_map = total, None
    if draw.chance(0.4):
        held = draw.number(1, total)
        expert_map = torch.full((total,), -1, dtype=torch.int32)
        chosen = torch.from_numpy(draw.rng.permutation(total)[:held])
        expert_map[chosen] = torch.arange(held, dtype=torch.int32)
    k = 16 * draw.number(1, 4 if draw.gpu else 12)
    x = draw.floats((tokens, k), draw.one(BF16, FP16), 3)
    router = draw_router(draw, total, biased)
    tiles = draw.one(8, 16, 32) if draw.gpu else draw.one(8, 8, 16, *TILE_TOKENS)
    logits, bias, padding = given["logits"], given["bias"], given["padding"]
    return x, Logits(logits, router, held, tiles, expert_map, bias, padding)


# --- the formula ----------------------------------------------------------------------------------


def check_topk(given: Given, result: Any, after: Given) -> None:
    weights, ids = result
    logits, router = float64(given["logits"]), given["router"]
    shape = (len(logits), router.top_k)
    require(tuple(ids.shape) == shape and ids.dtype == torch.int32, "topk_ids: shape or dtype")
    require(weights.dtype == FP32, "topk_weights: dtype")
    bias = None if given["bias"] is None else float64(given["bias"])
    for token, row in enumerate(logits):
        chosen = ids[token].tolist()
        if given["padding"] is not None and bool(given["padding"][token]):
            require(chosen == [-1] * router.top_k, f"topk_ids[{token}]: of no token, is {chosen}")
            require(not weights[token].any(), f"topk_weights[{token}]: of no token, is not 0")
            continue
        scores = score(row, router)
        require(set(chosen) <= set(range(len(row))), f"topk_ids[{token}]: is {chosen}")
        require(len(set(chosen)) == len(chosen), f"topk_ids[{token}]: {chosen} has one twice")
        _check_choice(f"topk_ids[{token}]", chosen, row, scores, bias, router)
        check_weights(f"topk_weights[{token}]", weights[token], row, scores, chosen, router)


def score(row: Float64, router: Router) -> Float64:
    """Scores of a token's experts."""
    with np.errstate(all="ignore"):
        if router.scoring == "sigmoid":
            return np.asarray(1.0 / (1.0 + np.exp(-row)))
        shifted = np.exp(row - np.max(row))
        return np.asarray(shifted / np.sum(shifted))


def check_weights(
    name: str, found: Tensor, row: Float64, scores: Float64, chosen: list[int], router: Router
) -> None:
    """Check the weights of a token's slots."""
    with np.errstate(all="ignore"):
        weights = scores[chosen]
        if router.renormalize and router.scoring == "softmax":
            shifted = np.exp(row[chosen] - np.max(row[chosen]))
            weights = shifted / np.sum(shifted)
        elif router.renormalize:
            weights = weights / (np.sum(weights) + NOT_ZERO)
        weights = weights * np.float32(router.scale)
        near(name, found, weights, ERROR * np.abs(weights) + 2.0**-120)


def _check_choice(
    name: str,
    chosen: list[int],
    row: Float64,
    scores: Float64,
    bias: Float64 | None,
    router: Router,
) -> None:
    """Check top-k: exactly for logits; for sums with a bias, up to rounding."""
    keys = row if bias is None else scores + bias
    slack = np.zeros_like(keys)
    if bias is not None:
        slack = ERROR * (np.abs(scores) + np.abs(bias)) + 2.0**-120
    keys = np.where(np.isnan(keys), np.inf, keys) if bias is None else keys
    if bias is not None and not np.isfinite(keys).all():
        return  # a sum of an infinite bias; torch's own order of NaN is not the formula's
    if bias is None:
        order = _greatest(np.where(np.isnan(row), np.inf, row), np.isnan(row))
        groups = len(row) // router.groups
        best = [min(order.index(e) for e in range(g * groups, (g + 1) * groups))
                for g in range(router.groups)]  # fmt: skip
        kept = set(np.argsort(best, kind="stable")[: router.top_groups].tolist())
        expected = [e for e in order if e // groups in kept][: router.top_k]
        require(chosen == expected, f"{name}: is {chosen}, must be {expected}")
        return
    size = len(row) // router.groups
    pairs = np.sort(keys.reshape(router.groups, size), -1)[:, ::-1]
    sums = pairs[:, :2].sum(-1) if router.groups > 1 else np.zeros(1)
    loose = 4 * np.max(slack)
    inside = {e // size for e in chosen}
    for g in inside:
        better = int(np.sum(sums > sums[g] + loose))
        require(better < router.top_groups, f"{name}: group {g} is none of the best")
    certain = {
        g for g in range(router.groups)
        if int(np.sum(sums >= sums[g] - loose)) <= router.top_groups
    }  # fmt: skip
    for first, second in pairwise(chosen):
        require(keys[first] >= keys[second] - loose, f"{name}: {chosen} does not descend")
    last = min(keys[e] for e in chosen)
    for e in set(range(len(row))) - set(chosen):
        missed = e // size in certain and keys[e] > last + loose
        require(not missed, f"{name}: {chosen} lacks {e}")


def _greatest(values: Float64, undefined: Any) -> list[int]:
    """Experts in descending order of value, NaN first; ties: the lower index first."""
    return [int(e) for e in np.lexsort((np.arange(len(values)), -values, ~undefined))]


def chosen(source: Logits, found: Tensor) -> Ids:
    """Check weights by the reference, which is fuzzed separately; return the chosen experts."""
    weights, ids = moe_topk(source.logits, source.bias, source.padding, source.router)
    spread = ERROR * np.abs(float64(weights)) + 2.0**-120
    within("topk_weights", found, float64(weights) - spread, float64(weights) + spread)
    return Ids(ids, source.num_experts, source.tile_tokens, source.expert_map)


OPS = {
    "moe_topk": Op(draw_topk, check_topk),
}
