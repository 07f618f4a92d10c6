"""``grouped_gemm``: every tile's product with its expert's weight, bit-identical to float64."""

from typing import Any

import numpy as np
import pytest
import torch

from nvfp4_kernels import InvalidArgument, PerToken, Static, grouped_gemm, grouped_silu_mul_gemm
from nvfp4_kernels.activation import UNGATED, Activation
from nvfp4_kernels.formats.terms import quantize_terms
from tests.test_kernels.compilation import check_op
from tests.test_kernels.gemm.grouped.grouped_cases import (
    CASES,
    W4A16_CASES,
    GroupedCase,
    grouped_problem,
)
from tests.test_kernels.routing_cases import RoutingCase

EVERY_CASE = pytest.mark.parametrize(
    "case",
    [*CASES.values(), *W4A16_CASES.values()],
    ids=[*CASES, *map("w4a16, {}".format, W4A16_CASES)],
)


@EVERY_CASE
def test_grid_values_are_exact(case: GroupedCase) -> None:
    problem = grouped_problem(case, gated=False)
    out = grouped_gemm(**problem.args)
    assert out.dtype == case.out_dtype
    for tile in range(problem.used):
        expected = torch.from_numpy(problem.products(tile)).float().to(case.out_dtype)
        assert torch.equal(out[tile], expected)


@pytest.mark.parametrize("name", UNGATED)
def test_activations(name: str) -> None:
    case = CASES["ids of no expert"]
    problem = grouped_problem(case, gated=False)
    out = grouped_gemm(**problem.args, activation=Activation(name))
    for tile in range(problem.used):
        x = torch.from_numpy(problem.products(tile))
        expected = {
            "relu2": lambda x: x.clamp(min=0) ** 2,
            "silu": lambda x: x / (1 + torch.exp(-x)),
            "gelu": lambda x: x / 2 * (1 + torch.erf(x / 2**0.5)),
            "gelu_tanh": lambda x: (
                x / 2 * (1 + torch.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))
            ),
        }[name](x)
        torch.testing.assert_close(out[tile].double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("out_terms", [1, 2])
@pytest.mark.parametrize("name", [n for n, case in CASES.items() if case.n % 16 == 0])
def test_quantised_is_the_float32_result_quantised(name: str, out_terms: int) -> None:
    problem = grouped_problem(CASES[name], gated=False)
    args = {**problem.args, "activation": Activation("relu2")}
    args["out_dtype"] = torch.float32
    exact = grouped_gemm(**args)
    del args["out_dtype"]
    scale = torch.linspace(0.002, 0.02, CASES[name].routing.experts)
    data, scales = grouped_gemm(**args, output=Static(scale, out_terms))
    for tile in range(problem.used):
        expert = int(problem.routing.groups[1 + tile])
        want, want_scales = quantize_terms(exact[tile], scale[expert], out_terms)
        assert torch.equal(data[tile], want)
        assert torch.equal(scales[tile].view(torch.uint8), want_scales.view(torch.uint8))


def test_is_one_op() -> None:
    args = grouped_problem(CASES["two terms"], gated=False).args
    given = [args[name] for name in ("a", "a_scales", "groups", "b", "b_scales", "alpha")]
    rest = (args["row_scale"], None, None, None, None, 1.0, 0.0, torch.bfloat16, 2)
    check_op(torch.ops.nvfp4.grouped_gemm, (*given, *rest))
    scale = torch.ones(8)
    rest = (args["row_scale"], None, scale, "relu2", None, 1.0, 0.0, 2, 3)
    check_op(torch.ops.nvfp4.grouped_gemm_quantized, (*given, *rest))


REFUSED = [
    ({"groups": torch.zeros(3)}, r"groups: dtype is float32, must be int32"),
    ({"groups": torch.zeros(3, dtype=torch.int32)}, r"groups: shape is \(3,\), must be"),
    ({"alpha": torch.ones(8, 2)}, r"alpha: shape is \(8, 2\), must be \(8,\)"),
    ({"b": lambda b: b[0]}, r"b: shape is \(80, 32\), must be \(experts, N, K/2\)"),
    ({"b": lambda b: b.unsqueeze(1)}, r"b: shape is \(8, 1, 80, 32\), must be \(experts, N, K/2\)"),
    ({"b_scales": lambda s: s[:7]}, r"b_scales: shape is \(7, "),
    ({"a": lambda a: a[:, :7]}, r"a_scales: shape|a: T: is 7, must be one of"),
    ({"n": 79}, r"n: is 79, must be 80 as b's rows"),
    ({"activation": Activation("swish")}, r"activation: is 'swish', must be one of silu, gelu"),
    ({"activation": Activation("silu", 7.0)}, r"activation: limit, alpha and beta are \[7.0"),
    ({"out_dtype": torch.float64}, r"out_dtype: is torch.float64"),
    ({"terms": 2}, r"a: shape is .*, must be \(..., 2, rows, K/2\)"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_refuses(change: dict, message: str) -> None:
    case = GroupedCase(RoutingCase(9, 2, 8), 80, 64)
    args = grouped_problem(case, gated=False).args
    for name, value in change.items():
        args[name] = value(args[name]) if callable(value) else value
    with pytest.raises(InvalidArgument, match=message):
        grouped_gemm(**args)


REFUSED_OUTPUTS = [
    ({"output": Static(torch.ones(()))}, r"output.global_scale: shape is \(\), must be \(8,\)"),
    ({"output": Static(torch.ones(8).half())}, r"output.global_scale: dtype is float16"),
    ({"output": Static(torch.ones(8), 9)}, r"output.terms: is 9, must be 1 to 4"),
    ({"output": PerToken()}, r"output: is a PerToken, must be None or Static"),
    ({"output": torch.ones(8)}, r"output: is a Tensor, must be None or Static"),
    ({"out_dtype": torch.float16}, r"out_dtype: is torch.float16 with output=Static"),
    ({"n": 80}, r"n: is 80 with output=Static.*, must be left out"),
]


@pytest.mark.parametrize("op", [grouped_gemm, grouped_silu_mul_gemm])
@pytest.mark.parametrize(
    ("change", "message"), REFUSED_OUTPUTS, ids=[m for _, m in REFUSED_OUTPUTS]
)
def test_refuses_outputs(op: Any, change: dict, message: str) -> None:
    case = GroupedCase(RoutingCase(9, 2, 8), 80, 64)
    args = grouped_problem(case, gated=op is grouped_silu_mul_gemm).args
    del args["out_dtype"]
    with pytest.raises(InvalidArgument, match=message):
        op(**{**args, "output": Static(torch.ones(8)), **change})


def test_fragments_need_n() -> None:
    args = grouped_problem(W4A16_CASES["fragments"], gated=False).args
    with pytest.raises(InvalidArgument, match="n: is None, must be the rows of each matrix"):
        grouped_gemm(**(args | {"n": None}))
