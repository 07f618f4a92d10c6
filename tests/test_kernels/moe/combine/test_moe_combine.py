"""``moe_combine``: the reference against float64, slot after slot."""

import math

import pytest
import torch
from torch import Tensor

from nvfp4_kernels import InvalidArgument, moe_combine
from tests.test_kernels.compilation import check_compiled, check_op
from tests.test_kernels.routing_cases import CASES, RoutingCase

EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def combine_arguments(
    case: RoutingCase, h: int, dtype: torch.dtype = BF16
) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments whose rows outside slots are NaN, as are weights of slots without a row."""
    ids = case.topk_ids()
    routing = case.routing(ids)
    y = torch.full((*routing.slots.shape, h), math.nan)
    rows = routing.rows[routing.rows >= 0].long()
    y.view(-1, h)[rows] = torch.randn(len(rows), h)
    weights = torch.where(routing.rows >= 0, torch.rand(ids.shape), math.nan)
    return y.to(dtype), routing.rows, weights


def check_combined(out: Tensor, y: Tensor, rows: Tensor, weights: Tensor | None) -> None:
    for token in range(len(rows)):
        total = torch.zeros(y.shape[2])
        for slot, row in enumerate(rows[token].tolist()):
            if row >= 0:
                value = y.flatten(0, 1)[row].float()
                total += value if weights is None else value * weights[token, slot]
        torch.testing.assert_close(out[token], total.to(out.dtype), rtol=0, atol=0)


@EVERY_CASE
def test_sums_slots_in_order(case: RoutingCase) -> None:
    y, rows, weights = combine_arguments(case, 48)
    check_combined(moe_combine(y, rows, weights), y, rows, weights)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_dtypes(dtype: torch.dtype) -> None:
    y, rows, _ = combine_arguments(CASES["ids of no expert"], 16, dtype)
    for out_dtype in (BF16, FP16, FP32):
        out = moe_combine(y, rows, None, out_dtype)
        assert out.dtype == out_dtype
        check_combined(out, y, rows, None)


def test_is_one_op() -> None:
    y, rows, weights = combine_arguments(CASES["linear map"], 16)
    check_op(torch.ops.nvfp4.moe_combine, (y, rows, weights, BF16))
    calls = [((y, rows[:m].clone(), weights[:m].clone()), {}) for m in (len(rows), 7)]
    check_compiled(lambda *given: moe_combine(*given), calls, graphs=1)


Y, ROWS, WEIGHTS = torch.zeros(2, 8, 16), torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((Y.double(), ROWS), r"y: dtype is float64, must be bfloat16, float16, float32"),
        ((Y[0], ROWS), r"y: shape is \(8, 16\), must be \(tiles, T, H\)"),
        ((Y, ROWS.long()), r"rows: dtype is int64, must be int32"),
        ((Y, ROWS[0]), r"rows: shape is \(2,\), must be \(M, k\)"),
        ((Y, ROWS + 16), r"rows: holds 16, must be below 16, the rows of y's tiles"),
        ((None, ROWS), r"y: is NoneType, must be a tensor of bfloat16, float16, float32"),
        ((Y, ROWS, WEIGHTS.bfloat16()), r"topk_weights: dtype is bfloat16, must be float32"),
        ((Y, ROWS, WEIGHTS[:2]), r"topk_weights: shape is \(2, 2\), must be \(3, 2\)"),
        ((Y, ROWS, None, torch.float64), r"out_dtype: is torch.float64, must be"),
    ],
)
def test_refuses(arguments: tuple, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        moe_combine(*arguments)
