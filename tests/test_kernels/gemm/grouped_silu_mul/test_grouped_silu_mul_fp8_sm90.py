"""``grouped_silu_mul_gemm`` of E4M3 tokens in tiles, on the CPU and sm_90; folded weights.

Sums and factors are exact; only the activation and one rounding differ from float64.
"""

from typing import Any

import pytest
import torch

from nvfp4_kernels import InvalidArgument, StaticFp8, grouped_silu_mul_gemm
from nvfp4_kernels.activation import SILU, Activation
from nvfp4_kernels.gemm.grouped_silu_mul import reference
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
from tests.test_kernels.gemm.grouped.grouped_cases import GroupedCase
from tests.test_kernels.gemm.grouped_silu_mul.test_grouped_silu_mul_sm90 import (
    ACTIVATIONS,
    check_close,
)

FP32 = torch.float32
SM90 = pytest.mark.arch("sm_90")
SCHEDULE = pytest.mark.schedules("random 1")
EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def check(case: GroupedCase, activation: Activation, device: torch.device) -> None:
    """Compare with float64; a GPU truncates sums, in which small gates have a large share."""
    problem = folded_problem(case, gated=True)
    if device.type != "cuda":
        check_close(problem, activation, device, case.out_dtype)
        return
    args = on_device({**problem.args, "activation": activation}, device)
    out = grouped_silu_mul_gemm(**args).cpu()
    for tile in range(problem.used):
        gate, up = (torch.from_numpy(each) for each in problem.products(tile))
        check_results(out[tile], activation.gated(gate, up), case.k, on_gpu=True)


@EVERY_CASE
def test_reference(case: GroupedCase) -> None:
    problem = folded_problem(case, gated=True)
    check_close(problem, SILU, torch.device("cpu"), case.out_dtype)


@SM90
@SCHEDULE
@EVERY_CASE
def test_cases(case: GroupedCase, op_device: torch.device) -> None:
    check(case, SILU, op_device)


@SM90
@SCHEDULE
@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_activations(activation: Activation, op_device: torch.device) -> None:
    check(CASES["float32 out"], activation, op_device)


@SM90
@SCHEDULE
@pytest.mark.parametrize("name", EVERY_SIZE)
def test_e4m3_results(name: str, op_device: torch.device) -> None:
    """Each expert's results have its scale; columns past N are zeros."""
    problem = folded_problem(CASES[name], gated=True)
    scale, args = out_scales(CASES[name].routing.experts), on_device(problem.args, op_device)
    del args["out_dtype"]
    found = grouped_silu_mul_gemm(**args, output=StaticFp8(scale.to(op_device)))
    call = call_of(problem, SILU)._replace(output=StaticFp8(scale))
    expected, _ = reference.grouped_silu_mul_gemm(call)
    ours, theirs = (
        each[: problem.used].cpu().contiguous().view(torch.uint8).int()
        for each in (found, expected)
    )
    assert found.shape == expected.shape
    if op_device.type == "cuda":
        exact, _ = reference.grouped_silu_mul_gemm(call._replace(output=None, out_dtype=FP32))
        for tile in range(problem.used):
            of_expert = scale[int(problem.routing.groups[1 + tile])]
            check_results(found[tile].cpu(), exact[tile], CASES[name].k, of_expert, on_gpu=True)
    else:  # exponentials differ by ulps, which may move a rounding
        steps = (ours - theirs).abs()
        assert steps.max() <= 1
        assert steps.float().mean() < 0.01
    assert theirs.count_nonzero() > 0.3 * theirs.numel()
    n = CASES[name].n
    if n % 64:
        past = [byte for byte in range(n // 64 * 64, ours.shape[-1]) if element_of(byte) >= n]
        assert not ours[..., past].any()


def element_of(byte: int) -> int:
    """Element of a row that byte ``byte`` holds."""
    quarter, rest = divmod(byte % 64, 16)
    block, rest = divmod(rest, 4)
    pair, half = divmod(rest, 2)
    return byte // 64 * 64 + 16 * block + 8 * half + 2 * quarter + pair


@SM90
@SCHEDULE
@pytest.mark.parametrize("activation", [SILU, ACTIVATIONS["swigluoai"]], ids=["silu", "swigluoai"])
def test_nan_stays_in_its_row(activation: Activation, op_device: torch.device) -> None:
    """NaN in a token makes its row NaN, whatever the activation's limits, in E4M3 as well."""
    problem = folded_problem(CASES["one token"], gated=True)
    problem.args["a"].view(torch.uint8)[0, 3, 5] = 0x7F
    args = on_device({**problem.args, "activation": activation}, op_device)
    scale = StaticFp8(torch.ones(len(problem.args["alpha"]), device=op_device))
    rows = [grouped_silu_mul_gemm(**args).cpu()]
    del args["out_dtype"]
    # Past N = 96 there are zeros, half of the second group's bytes.
    rows.append(grouped_silu_mul_gemm(**args, output=scale).cpu().float()[..., :64])
    for out in rows:
        assert out[0, 3].isnan().all()
        assert not out[0, :3].isnan().any()
        assert not out[0, 4:].isnan().any()


@SM90
@SCHEDULE
def test_each_shard_has_its_alpha(op_device: torch.device) -> None:
    problem = folded_problem(CASES["one token"], gated=True)
    alpha = problem.args["alpha"]
    for shard in range(2):
        factors = torch.ones(2, 1)
        factors[shard] = 0.0
        args = {**problem.args, "alpha": alpha * factors}
        out = grouped_silu_mul_gemm(**on_device(args, op_device)).cpu()
        assert not out[: problem.used].any()
    assert grouped_silu_mul_gemm(**on_device(problem.args, op_device)).cpu()[0].any()


def test_is_one_op() -> None:
    args = folded_problem(CASES["ids of no expert"], gated=True).args
    given = [args[name] for name in ("a", "a_scales", "groups", "b", "b_scales", "alpha")]
    rest = args["row_scale"], None, args["n"]
    op = torch.ops.nvfp4.grouped_silu_mul_gemm
    check_op(op, (*given, *rest, *SILU, torch.bfloat16, 1))
    scale = out_scales(len(args["alpha"]))
    check_op(torch.ops.nvfp4.grouped_silu_mul_gemm_fp8, (*given, *rest, scale, *SILU))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "16-bit tokens": (
        {"a": lambda a: a.float().bfloat16()},
        r"a: is bfloat16 with a folded weight \(int32 b_scales\), must be float8_e4m3fn",
    ),
    "single weights": (
        {"b": lambda b: b[:, 0]},
        r"b: shape is .*, must be \(experts, 2, N, K/2\), or that of fragments",
    ),
    "factors of weights": (
        {"alpha": lambda alpha: alpha[..., 0].contiguous()},
        r"alpha: shape is \(6, 2\), must be \(6, 2, 160\); one factor for each row of each matrix",
    ),
    "no n": ({"n": None}, r"n: is None, must be the rows of each matrix of b"),
    "no activation": ({"activation": None}, r"activation: is None, must be one of"),
    "one scale of the result": (
        {"output": StaticFp8(torch.tensor(1.0))},
        r"output.scale: shape is \(\), must be \(6,\); one scale for each expert",
    ),
    "a scale of each product": (
        {"output": StaticFp8(torch.ones(6, 2))},
        r"output.scale: shape is \(6, 2\), must be \(6,\); one scale for each expert",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refuses(what: str) -> None:
    args = folded_problem(CASES["ids of no expert"], gated=True).args
    changes, message = REFUSED[what]
    for name, value in changes.items():
        args[name] = value(args[name]) if callable(value) else value
    if "output" in changes:
        del args["out_dtype"]
    with pytest.raises(InvalidArgument, match=message):
        grouped_silu_mul_gemm(**args)
