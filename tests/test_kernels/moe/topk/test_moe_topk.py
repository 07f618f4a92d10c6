"""``moe_topk`` on the CPU, against a loop over tokens and experts in Python floats."""

import math

import pytest
import torch

from nvfp4_kernels import moe_topk
from nvfp4_kernels.moe.router import Router
from tests.test_kernels.router_cases import CASES, RouterCase


def of_token(
    logits: list[float], bias: list[float] | None, router: Router
) -> tuple[list[float], list[int]]:
    """Weights and experts of one token."""
    peak = max(logits)
    powers = [math.exp(x - peak) for x in logits]
    scores = [power / sum(powers) for power in powers]
    if router.scoring == "sigmoid":
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    order = scores if bias is None else [s + b for s, b in zip(scores, bias, strict=True)]
    size = len(logits) // router.groups

    def of_group(group: int) -> float:
        best = sorted(order[group * size : (group + 1) * size])
        return best[-1] if bias is None else sum(best[-2:])

    groups = sorted(range(router.groups), key=lambda g: -of_group(g))[: router.top_groups]
    among = [e for e in range(len(logits)) if e // size in groups]
    chosen = sorted(among, key=lambda e: -order[e])[: router.top_k]
    weights = [scores[e] for e in chosen]
    total = sum(weights) if router.renormalize else 1.0
    return [weight / total * router.scale for weight in weights], chosen


def check(case: RouterCase) -> None:
    logits, bias, padding = case.given()
    weights, ids = moe_topk(logits, case.router, bias, padding)
    for token, (found, chosen) in enumerate(zip(weights.tolist(), ids.tolist(), strict=True)):
        if padding is not None and padding[token]:
            expected = [0.0] * case.router.top_k, [-1] * case.router.top_k
        else:
            numbers = None if bias is None else bias.tolist()
            expected = of_token(logits[token].double().tolist(), numbers, case.router)
        assert chosen == expected[1]
        assert found == pytest.approx(expected[0], rel=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_against_a_loop(name: str) -> None:
    check(CASES[name])


def test_weights_add_up() -> None:
    weights, _ = moe_topk(torch.randn(7, 32), Router(4, "sigmoid", scale=2.5))
    torch.testing.assert_close(weights.sum(1), torch.full((7,), 2.5))
    few, _ = moe_topk(torch.randn(7, 32), Router(4, renormalize=False))
    assert (few.sum(1) < 1.0).all()
