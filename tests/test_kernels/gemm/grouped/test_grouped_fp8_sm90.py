"""``grouped_gemm`` of E4M3 tokens in tiles, on the CPU and sm_90; weights of all experts folded."""

from typing import Any

import pytest
import torch

from nvfp4_kernels import InvalidArgument, NoKernelError, StaticFp8, grouped_gemm
from nvfp4_kernels.activation import UNGATED, Activation
from nvfp4_kernels.gemm.grouped import reference
from tests import devices
from tests.emulator import EAGER
from tests.test_kernels.compilation import check_op
from tests.test_kernels.gemm.grouped.cases_fp8 import (
    CASES,
    EVERY_SIZE,
    call_of,
    check_results,
    folded_problem,
    out_scales,
)
from tests.test_kernels.gemm.grouped.cases_sm90 import on_device
from tests.test_kernels.gemm.grouped.grouped_cases import GroupedCase, GroupedProblem

SM90 = [pytest.mark.arch("sm_90"), pytest.mark.schedules("random 1")]
EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def on_sm90(test: Any) -> Any:
    """Mark a test of the kernel; other tests are of the reference."""
    for mark in SM90:
        test = mark(test)
    return test


def check_exact(
    out: torch.Tensor, problem: GroupedProblem, case: GroupedCase, *, on_gpu: bool = False
) -> None:
    """Compare the tiles in use with float64; see ``check_results``."""
    assert out.dtype == case.out_dtype
    assert out.shape == (*problem.a.shape[:2], case.n)
    for tile in range(problem.used):
        check_results(out[tile], torch.from_numpy(problem.products(tile)), case.k, on_gpu=on_gpu)


@EVERY_CASE
def test_reference_is_exact(case: GroupedCase) -> None:
    problem = folded_problem(case, gated=False)
    check_exact(grouped_gemm(**problem.args), problem, case)


@on_sm90
@EVERY_CASE
def test_grid_values_are_exact(case: GroupedCase, op_device: torch.device) -> None:
    problem = folded_problem(case, gated=False)
    out = grouped_gemm(**on_device(problem.args, op_device)).cpu()
    check_exact(out, problem, case, on_gpu=op_device.type == "cuda")


@on_sm90
@pytest.mark.parametrize("name", EVERY_SIZE)
def test_e4m3_results(name: str, op_device: torch.device) -> None:
    """Each expert's results have its scale; columns past N are zeros."""
    case = CASES[name]
    problem = folded_problem(case, gated=False)
    scale, args = out_scales(case.routing.experts), on_device(problem.args, op_device)
    del args["out_dtype"]
    out = grouped_gemm(**args, output=StaticFp8(scale.to(op_device))).cpu()
    on_gpu = op_device.type == "cuda"
    for tile in range(problem.used):
        exact = torch.from_numpy(problem.products(tile))
        of_expert = scale[int(problem.routing.groups[1 + tile])]
        check_results(out[tile], exact, case.k, of_expert, on_gpu=on_gpu)
    assert problem.used > 0


@on_sm90
@pytest.mark.parametrize("name", UNGATED)
def test_activations(name: str, op_device: torch.device) -> None:
    problem = folded_problem(CASES["float32 out"], gated=False)
    args = {**problem.args, "activation": Activation(name)}
    out = grouped_gemm(**on_device(args, op_device)).cpu()
    for tile in range(problem.used):
        expected = Activation(name).ungated(torch.from_numpy(problem.products(tile)))
        if op_device.type == "cuda":
            check_results(out[tile], expected, CASES["float32 out"].k, on_gpu=True)
            continue
        if name == "relu2":
            assert torch.equal(out[tile], expected.float())
        # Near zero, 1 + erf cancels to within 2^-23.
        torch.testing.assert_close(out[tile].double(), expected, rtol=1e-5, atol=2e-6)


@on_sm90
def test_nan_stays_in_its_row(op_device: torch.device) -> None:
    problem = folded_problem(CASES["one token"], gated=False)
    problem.args["a"].view(torch.uint8)[0, 3, 5] = 0x7F
    out = grouped_gemm(**on_device(problem.args, op_device)).cpu()
    assert out[0, 3].isnan().all()
    assert not out[0, :3].isnan().any()
    assert not out[0, 4:].isnan().any()


@on_sm90
@pytest.mark.parametrize("name", ["a", "alpha", "groups", "row_scale"])
def test_what_is_not_aligned_is_refused(name: str, op_device: torch.device) -> None:
    args = on_device(folded_problem(CASES["ids of no expert"], gated=False).args, op_device)
    given = args[name]
    shifted = torch.empty(given.numel() + 1, dtype=given.dtype, device=op_device)[1:]
    shifted = shifted.view(given.shape).copy_(given)
    with pytest.raises(InvalidArgument, match=f"{name}: starts .* after a multiple of 16"):
        grouped_gemm(**{**args, name: shifted})


@on_sm90
def test_a_scale_that_is_not_aligned_is_refused(op_device: torch.device) -> None:
    args = on_device(folded_problem(CASES["one token"], gated=False).args, op_device)
    scale = torch.ones(CASES["one token"].routing.experts + 1, device=op_device)[1:]
    del args["out_dtype"]
    with pytest.raises(InvalidArgument, match=r"output\.scale: starts .* after a multiple of 16"):
        grouped_gemm(**args, output=StaticFp8(scale))


def test_reference_is_the_call() -> None:
    """The op passes every argument on."""
    problem = folded_problem(CASES["bias, 128 tokens"], gated=False)
    activation = Activation("gelu_tanh")
    out = grouped_gemm(**problem.args, activation=activation)
    expected, _ = reference.grouped_gemm(call_of(problem, activation))
    assert torch.equal(out, expected)


def test_is_one_op() -> None:
    args = folded_problem(CASES["ids of no expert"], gated=False).args
    given = [args[name] for name in ("a", "a_scales", "groups", "b", "b_scales", "alpha")]
    rest = args["row_scale"], None, args["n"]
    activation = "relu2", None, 1.0, 0.0
    check_op(torch.ops.nvfp4.grouped_gemm, (*given, *rest, *activation, torch.bfloat16, 1))
    scale = out_scales(len(args["alpha"]))
    check_op(torch.ops.nvfp4.grouped_gemm_fp8, (*given, *rest, scale, *activation))


def test_blackwell_has_no_kernel() -> None:
    args = folded_problem(CASES["one token"], gated=False).args
    with (
        devices.emulated_ops(EAGER, "sm_100"),
        pytest.raises(NoKernelError, match=r"no w4a8 kernel .*grouped_gemm_w4a8/fp8_wgmma \(sm_90"),
    ):
        grouped_gemm(**args)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "16-bit tokens": (
        {"a": lambda a: a.float().bfloat16()},
        r"a: is bfloat16 with a folded weight \(int32 b_scales\), must be float8_e4m3fn",
    ),
    "a K that is not padded": (
        {"a": lambda a: a.view(torch.uint8)[..., :48].view(a.dtype)},
        r"a: shape is \(\d+, 8, 48\), must be \(..., M, K\) with K padded to a positive multiple",
    ),
    "another K": (
        {"a": lambda a: torch.cat([a.view(torch.uint8)] * 3, -1).view(a.dtype)},
        r"b: shape is \(6, 3, 1, 2, 4, 32, 16\), must be \(6, 3, 3, 2, 4, 32, 16\)",
    ),
    "no n": ({"n": None}, r"n: is None, must be the rows of each matrix of b"),
    "another n": ({"n": 200}, r"b: shape is \(6, 3, .* must be \(6, 4, 1"),
    "factors of experts": (
        {"alpha": lambda alpha: alpha[:, 0].contiguous()},
        r"alpha: shape is \(6,\), must be \(6, 160\); one factor for each row of each matrix",
    ),
    "one matrix": ({"b": lambda b: b[0]}, r"b: shape is .*, must be \(experts, N, K/2\), or"),
    "scales of one expert": (
        {"b_scales": lambda s: s[:1]},
        r"b_scales: shape is \(1, 3, 1, 4, 32\), must be \(6, 3, 1, 4, 32\)",
    ),
    "scales of tiles": (
        {"row_scale": lambda s: s[:, 0]},
        r"row_scale: shape is \(\d+,\), must be \(\d+, 8\); one global scale per row of a",
    ),
    "several terms": (
        {"terms": 2},
        "terms: is 2 with E4M3 activations, must be 1; leave terms out",
    ),
    "E4M3 by dtype": (
        {"out_dtype": torch.float8_e4m3fn},
        r"out_dtype: is torch.float8_e4m3fn, must be one of",
    ),
    "one scale of the result": (
        {"output": StaticFp8(torch.tensor(1.0))},
        r"output.scale: shape is \(\), must be \(6,\); one scale for each expert",
    ),
    "a 16-bit scale of the result": (
        {"output": StaticFp8(torch.ones(6).bfloat16())},
        r"output.scale: dtype is bfloat16, must be float32",
    ),
    "a gated activation": (
        {"activation": Activation("swigluoai_uninterleave")},
        r"activation: is 'swigluoai_uninterleave', must be one of",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refuses(what: str) -> None:
    args = folded_problem(CASES["ids of no expert"], gated=False).args
    changes, message = REFUSED[what]
    for name, value in changes.items():
        args[name] = value(args[name]) if callable(value) else value
    if "output" in changes:
        del args["out_dtype"]
    with pytest.raises(InvalidArgument, match=message):
        grouped_gemm(**args)


def test_refuses_e4m3_results_of_other_weights() -> None:
    """E4M3 results need folded weights: those of 16-bit tokens are refused."""
    from tests.test_kernels.gemm.grouped.cases_sm90 import CASES as OTHERS
    from tests.test_kernels.gemm.grouped.cases_sm90 import problem_of

    args = problem_of(OTHERS["one token"], gated=False).args
    del args["out_dtype"]
    with pytest.raises(InvalidArgument, match=r"b: is in the layout 'fragments' .*must be folded"):
        grouped_gemm(**args, output=StaticFp8(torch.ones(8)))
