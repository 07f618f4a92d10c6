"""The kernel of ``moe_topk``: exactly the formula's experts, weights within a tolerance."""

import math

import pytest
import torch
from torch import Tensor

from nvfp4_kernels import InvalidArgument, moe_topk
from nvfp4_kernels.moe.router import Router
from nvfp4_kernels.moe.topk import reference
from tests.test_kernels.router_cases import CASES, RouterCase

pytestmark = pytest.mark.schedules("random 1")
SM90, SM100 = pytest.mark.arch("sm_90"), pytest.mark.arch("sm_100")
# An exponential is within 8 ulp: 2 ulp, and the rounding of its exponent, which is below 32. A
# sum has as many roundings as steps; four more roundings lead to the result.
TOLERANCE = 24 * 2.0**-23


def check(case: RouterCase, device: torch.device) -> None:
    given = case.given()
    moved = [each if each is None else each.to(device) for each in given]
    weights, ids = moe_topk(moved[0], case.router, *moved[1:])
    check_topk((weights, ids), reference.moe_topk(*given, case.router))


def check_topk(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    """Check for the same experts in the same order, and weights within ``TOLERANCE``."""
    assert torch.equal(found[1].cpu(), expected[1])
    torch.testing.assert_close(found[0].cpu(), expected[0], rtol=TOLERANCE, atol=0.0)


@SM100
@pytest.mark.parametrize("name", CASES)
def test_against_the_formula(name: str, op_device: torch.device) -> None:
    check(CASES[name], op_device)


@SM90
@pytest.mark.parametrize("name", ["Qwen3", "DeepSeek V3", "ties of groups", "padding"])
def test_on_hopper(name: str, op_device: torch.device) -> None:
    check(CASES[name], op_device)


@SM100
def test_extremes(op_device: torch.device) -> None:
    """NaN, infinities and zeros of both signs: no expert occurs twice, and all ids are valid."""
    logits = torch.tensor(
        [
            [math.nan] * 6,
            [-math.inf] * 6,
            [-0.0, 0.0, -0.0, 0.0, -1.0, 0.0],
            [1e30, -1e30, math.inf, 3.0, math.nan, 0.0],
        ]
    )
    for dtype in (torch.float32, torch.bfloat16):
        ids = moe_topk(logits.to(op_device, dtype), Router(4, "sigmoid"))[1].cpu()
        assert ids.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3], [4, 2, 0, 3]]
    # No sigmoid remains of such logits.
    weights, _ = moe_topk(torch.full((1, 6), -200.0).to(op_device), Router(2, "sigmoid"))
    assert weights.tolist() == [[0.0, 0.0]]


@SM100
@pytest.mark.parametrize("renormalize", [True, False], ids=["renormalized", "plain"])
def test_a_bias_selects_experts_far_below_the_best(
    renormalize: bool, op_device: torch.device
) -> None:
    """The selected experts' exponentials are zero next to the best logit's, which is not chosen."""
    logits = torch.tensor([[200.0, 0.0, 1.0, -3.0], [2.0, 1.0, -9.0, 0.0]])
    bias, router = torch.tensor([-10.0, 5.0, 5.0, 0.0]), Router(2, renormalize=renormalize)
    found = moe_topk(logits.to(op_device), router, bias.to(op_device))
    check_topk(found, reference.moe_topk(logits, bias, None, router))


@SM100
def test_refuses_what_kernels_cannot_read(op_device: torch.device) -> None:
    logits = torch.zeros(4, 16).to(op_device)
    with pytest.raises(InvalidArgument, match=r"logits: strides are \(1, 4\)"):
        moe_topk(logits.view(16, 4).t(), Router(2))
