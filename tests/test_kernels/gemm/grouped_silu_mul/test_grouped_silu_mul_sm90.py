"""``grouped_silu_mul_gemm`` on sm_90: 16-bit tokens in tiles, weights of all experts in fragments.

Sums and factors are exact; only the activation and one rounding differ from float64.
"""

import pytest
import torch

from nvfp4_kernels import grouped_silu_mul_gemm
from nvfp4_kernels.activation import SILU, Activation
from tests.test_kernels.gemm.grouped.cases_sm90 import CASES, on_device, problem_of
from tests.test_kernels.gemm.grouped.grouped_cases import GroupedCase, GroupedProblem
from tests.test_kernels.gemm.linear_cases import ROUNDOFF

pytestmark = [pytest.mark.arch("sm_90"), pytest.mark.schedules("random 1")]

ACTIVATIONS = {
    "silu": SILU,
    "clamped silu": Activation("silu", 0.75),
    "gelu": Activation("gelu"),
    "clamped gelu": Activation("gelu", 1.25),
    "gelu_tanh": Activation("gelu_tanh"),
    "swigluoai": Activation("swigluoai_uninterleave", 1.5, 1.702, 1.0),
    "swigluoai, clamped often": Activation("swigluoai_uninterleave", 0.5, 1.702, 1.0),
    "situ": Activation("situ", 1.5, 0.75),
    "situ without a limit": Activation("situ", None, 4.0),
    "swiglustep": Activation("swiglustep", 0.5),
    "swigluoai without a limit": Activation("swigluoai_uninterleave", None, 1.5, 0.5),
}


def check_close(
    problem: GroupedProblem, activation: Activation, device: torch.device, out_dtype: torch.dtype
) -> None:
    args = {**problem.args, "activation": activation}
    out = grouped_silu_mul_gemm(**on_device(args, device)).cpu()
    assert out.dtype == out_dtype
    for tile in range(problem.used):
        gate, up = (torch.from_numpy(each) for each in problem.products(tile))
        expected = activation.gated(gate, up)
        # exp2, the reciprocal and the products around them: a few float32 ulps. Where it cancels, 1
        # + erf     is within 2^-23; where it underflows, sigmoid is as small; times both factors.
        bound = (2 * ROUNDOFF[out_dtype] + 2.0**-19) * expected.abs()
        bound += 2.0**-22 * (gate * (up.abs() + activation.beta)).abs() + 1e-30
        if out_dtype == torch.float16:
            bound += torch.finfo(out_dtype).tiny
        assert ((out[tile].double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_cases(case: GroupedCase, op_device: torch.device) -> None:
    check_close(problem_of(case, gated=True), SILU, op_device, case.out_dtype)


@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_activations(activation: Activation, op_device: torch.device) -> None:
    problem = problem_of(CASES["float32 out"], gated=True)
    check_close(problem, activation, op_device, torch.float32)
    limit = activation.limit
    if limit is not None:
        products = torch.from_numpy(problem.products(0))
        assert (products.abs() > limit).any()
        assert (products.abs() < limit).any()


@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_nan_stays_in_its_row(activation: Activation, op_device: torch.device) -> None:
    """NaN in a token makes its row NaN, whatever the activation's limits."""
    problem = problem_of(CASES["one token"], gated=True)
    problem.args["a"][0, 3, 5] = torch.nan
    args = {**problem.args, "activation": activation}
    out = grouped_silu_mul_gemm(**on_device(args, op_device)).cpu()
    assert out[0, 3].isnan().all()
    assert not out[0, :3].isnan().any()
    assert not out[0, 4:].isnan().any()


def test_each_shard_has_its_alpha(op_device: torch.device) -> None:
    problem = problem_of(CASES["one token"], gated=True)
    alpha = problem.args["alpha"]
    for shard in range(2):
        factors = torch.ones(2)
        factors[shard] = 0.0
        args = {**problem.args, "alpha": alpha * factors}
        out = grouped_silu_mul_gemm(**on_device(args, op_device)).cpu()
        assert not out[: problem.used].any()
    assert grouped_silu_mul_gemm(**on_device(problem.args, op_device)).cpu()[0].any()
