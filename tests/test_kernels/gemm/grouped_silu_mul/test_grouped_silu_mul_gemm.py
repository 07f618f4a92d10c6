"""``grouped_silu_mul_gemm``: every tile with its own expert, and the chain of both products."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nvfp4_kernels import (
    InvalidArgument,
    Static,
    gemm,
    grouped_gemm,
    grouped_silu_mul_gemm,
    silu_mul_gemm,
)
from nvfp4_kernels.activation import Activation
from tests.test_kernels.compilation import check_op
from tests.test_kernels.gemm.grouped.grouped_cases import (
    CASES,
    W4A16_CASES,
    GroupedCase,
    GroupedProblem,
    grouped_problem,
)

EVERY = CASES | {f"w4a16, {name}": case for name, case in W4A16_CASES.items()}
# Cases without a bias, as ``silu_mul_gemm`` takes none.
UNBIASED = {name: case for name, case in EVERY.items() if case.bias is None}
BIASED = {name: case for name, case in EVERY.items() if case.bias is not None}


def of_tile(problem: GroupedProblem, tile: int) -> dict[str, Tensor | None]:
    """Arguments of ``silu_mul_gemm`` for one tile."""
    args, expert = problem.args, int(problem.routing.groups[1 + tile])
    given = {name: args[name] for name in ("a", "a_scales", "row_scale")}
    given = {name: None if t is None else t[tile] for name, t in given.items()}
    for shard, name in enumerate(("b1", "b2")):
        given |= {name: args["b"][expert, shard], f"{name}_scales": args["b_scales"][expert, shard]}
    return given | {"alpha": args["alpha"][expert], "terms": args["terms"]}


@pytest.mark.parametrize("case", UNBIASED.values(), ids=UNBIASED)
def test_is_silu_mul_gemm_of_each_tile(case: GroupedCase) -> None:
    problem = grouped_problem(case, gated=True)
    out = grouped_silu_mul_gemm(**problem.args)
    rest = {"out_dtype": case.out_dtype, "n": problem.args.get("n")}
    for tile in range(problem.used):
        assert torch.equal(out[tile], silu_mul_gemm(**of_tile(problem, tile), **rest))


@pytest.mark.parametrize("out_terms", [1, 3])
@pytest.mark.parametrize("name", [n for n in CASES if n in UNBIASED and CASES[n].n % 16 == 0])
def test_quantised_chain_is_that_of_each_tile(name: str, out_terms: int) -> None:
    """Both products: the second takes the first one's quantised result unchanged."""
    case = CASES[name]
    problem = grouped_problem(case, gated=True)
    args = {name: value for name, value in problem.args.items() if name != "out_dtype"}
    scale = torch.linspace(0.002, 0.02, case.routing.experts)
    h = grouped_silu_mul_gemm(**args, output=Static(scale, out_terms))
    down = grouped_problem(
        GroupedCase(case.routing, 32, case.n, out_dtype=torch.bfloat16), gated=False
    ).args
    out = grouped_gemm(
        *h, problem.routing.groups, down["b"], down["b_scales"], down["alpha"], terms=out_terms
    )
    for tile in range(problem.used):
        expert = int(problem.routing.groups[1 + tile])
        output = Static(scale[expert], out_terms)
        data, scales = silu_mul_gemm(**of_tile(problem, tile), output=output)
        assert torch.equal(h[0][tile], data)
        assert torch.equal(h[1][tile].view(torch.uint8), scales.view(torch.uint8))
        weight = down["b"][expert], down["b_scales"][expert], down["alpha"][expert : expert + 1]
        expected = gemm(data, scales, *weight, [32], terms=out_terms)
        torch.testing.assert_close(out[tile], expected, rtol=2**-7, atol=1e-6)


ACTIVATIONS: dict[str, tuple[Activation, Callable[[Tensor, Tensor], Tensor]]] = {
    "clamped silu": (
        Activation("silu", 0.75),
        lambda gate, up: _swish(gate.clamp(max=0.75)) * up.clamp(-0.75, 0.75),
    ),
    "gelu": (Activation("gelu"), lambda g, up: g / 2 * (1 + torch.erf(g / 2**0.5)) * up),
    "gelu_tanh": (
        Activation("gelu_tanh"),
        lambda g, up: g / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (g + 0.044715 * g**3))) * up,
    ),
    "swigluoai": (
        Activation("swigluoai_uninterleave", 1.5, 1.702, 1.0),
        lambda gate, up: _swish(gate.clamp(max=1.5), 1.702) * (up.clamp(-1.5, 1.5) + 1),
    ),
    "situ": (
        Activation("situ", 1.5, 0.75),
        lambda gate, up: _bounded(gate, 0.75) / (1 + torch.exp(-gate)) * _bounded(up, 1.5),
    ),
    "situ without a limit": (
        Activation("situ", None, 2.0),
        lambda gate, up: _bounded(gate, 2.0) / (1 + torch.exp(-gate)) * up,
    ),
    "swiglustep": (
        Activation("swiglustep", 0.5),
        lambda gate, up: _swish(gate).clamp(max=0.5) * up.clamp(-0.5, 0.5),
    ),
}


def _bounded(x: Tensor, bound: float) -> Tensor:
    return bound * (1 - 2 / (torch.exp(2 * x / bound) + 1))


def _swish(x: Tensor, alpha: float = 1.0) -> Tensor:
    return x / (1 + torch.exp(-alpha * x))


@pytest.mark.parametrize("case", BIASED.values(), ids=BIASED)
def test_bias(case: GroupedCase) -> None:
    """A bias is added to each projection before the activation."""
    problem = grouped_problem(case, gated=True)
    out = grouped_silu_mul_gemm(**problem.args)
    for tile in range(problem.used):
        gate, up = torch.from_numpy(problem.products(tile))
        expected = _swish(gate) * up
        torch.testing.assert_close(
            out[tile].double(), expected, rtol=2**-8 if case.out_dtype != torch.float32 else 1e-5,
            atol=1e-5,
        )  # fmt: skip


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str) -> None:
    activation, formula = ACTIVATIONS[name]
    problem = grouped_problem(CASES["ids of no expert"], gated=True)
    out = grouped_silu_mul_gemm(**problem.args, activation=activation)
    for tile in range(problem.used):
        expected = formula(*torch.from_numpy(problem.products(tile)))
        torch.testing.assert_close(out[tile].double(), expected, rtol=1e-5, atol=1e-5)


def test_is_one_op() -> None:
    args = grouped_problem(CASES["two terms"], gated=True).args
    given = [args[name] for name in ("a", "a_scales", "groups", "b", "b_scales", "alpha")]
    rest = (args["row_scale"], None, None, "silu", 7.0, 1.0, 0.0, torch.bfloat16, 2)
    check_op(torch.ops.nvfp4.grouped_silu_mul_gemm, (*given, *rest))
    rest = (args["row_scale"], torch.ones(8, 2, 64), torch.ones(8), "gelu", None, 1.0, 0.0, 2, 1)
    check_op(torch.ops.nvfp4.grouped_silu_mul_gemm_quantized, (*given, *rest))


REFUSED = [
    ({"alpha": torch.ones(8)}, r"alpha: shape is \(8,\), must be \(8, 2\)"),
    ({"b": lambda b: b[:, 0]}, r"b: shape is \(8, 80, 32\), must be \(experts, 2, N, K/2\)"),
    ({"activation": None}, r"activation: is None, must be one of silu, gelu"),
    ({"activation": Activation("relu2")}, r"activation: is 'relu2', must be one of silu, gelu"),
    ({"activation": Activation("silu", 0.0)}, r"activation.limit: is 0.0, must be positive"),
    ({"activation": Activation("silu", None, 1.702)}, r"activation.alpha: is 1.702, must be 1"),
    ({"activation": Activation("situ", None, 0.0)}, r"activation.alpha: is 0.0, must be positive"),
    ({"activation": Activation("situ", None, 1.0, 1.0)}, r"activation.beta: is 1.0, must be 0"),
    ({"activation": Activation("swiglustep")}, r"activation.limit: is None, must be given"),
    ({"bias": torch.ones(8, 80)}, r"bias: shape is \(8, 80\), must be \(8, 2, 80\)"),
    ({"bias": torch.ones(8, 2, 80).long()}, r"bias: dtype is int64, must be"),
    ({"row_scale": torch.ones(3, 8)}, r"row_scale: shape is \(3, 8\), must be"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_refuses(change: dict, message: str) -> None:
    case = GroupedCase(CASES["two terms"].routing, 80, 64)
    args = grouped_problem(case, gated=True).args
    for name, value in change.items():
        args[name] = value(args[name]) if callable(value) else value
    with pytest.raises(InvalidArgument, match=message):
        grouped_silu_mul_gemm(**args)


def test_refuses_fragments_for_a_quantised_result() -> None:
    args = grouped_problem(W4A16_CASES["fragments"], gated=True).args
    for name in ("out_dtype", "n"):
        del args[name]
    with pytest.raises(InvalidArgument, match="b: is in fragments"):
        grouped_silu_mul_gemm(**args, output=Static(torch.ones(8)))
