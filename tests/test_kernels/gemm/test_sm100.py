"""``gemm``, ``gemv`` and ``silu_mul_gemm`` on sm_100: the references' cases, public ops."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_kernels import (
    InvalidArgument,
    Static,
    gemm,
    gemv,
    quantize,
    silu_mul_gemm,
)
from tests.test_kernels.gemm import test_gemm, test_gemv
from tests.test_kernels.gemm.linear_cases import (
    Case,
    LinearOp,
    check_close,
    check_exact,
    grid_problem,
)
from tests.test_kernels.gemm.silu_mul import test_silu_mul_gemm

pytestmark = [pytest.mark.arch("sm_100"), pytest.mark.schedules("random 1")]


def on(device: torch.device, op: Callable[..., Any]) -> LinearOp:
    """``op`` on ``device``, with inputs and outputs on the CPU."""

    def run(**args: Any) -> Any:
        moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in args.items()}
        if isinstance(output := args.get("output"), Static):
            moved["output"] = Static(output.global_scale.to(device), output.terms)
        out = op(**moved)
        return tuple(t.cpu() for t in out) if isinstance(out, tuple) else out.cpu()

    return run


def w4a4(cases: dict[str, Any]) -> Any:
    chosen = {name: case for name, case in cases.items() if case.a_dtype is None}
    return pytest.mark.parametrize("case", chosen.values(), ids=chosen)


@w4a4(test_gemm.CASES)
def test_gemm_is_exact(case: Case, op_device: torch.device) -> None:
    check_exact(on(op_device, gemm), case)


@w4a4(test_gemv.CASES)
def test_gemv_is_exact(case: Case, op_device: torch.device) -> None:
    check_exact(on(op_device, gemv), case)


@w4a4(test_gemm.QUANTIZED)
def test_gemm_quantized(case: Case, op_device: torch.device) -> None:
    test_gemm.check_quantized(on(op_device, gemm), case)
    if case.m in (5, 37, 128):
        test_gemm.check_quantized(on(op_device, gemm), case, out_terms=2)


@pytest.mark.parametrize(
    "name",
    ["ragged", "everything", "Qwen3 0.6B qkv, N/4", "3 terms, everything", "4 terms, 33 rows"],
)
def test_gemm_is_close(name: str, op_device: torch.device) -> None:
    check_close(on(op_device, gemm), test_gemm.CASES[name])


@w4a4(test_silu_mul_gemm.CASES)
def test_silu_mul_gemm_is_exact(case: test_silu_mul_gemm.Case, op_device: torch.device) -> None:
    test_silu_mul_gemm.check_exact(on(op_device, silu_mul_gemm), case)


@pytest.mark.parametrize("name", ["one tile", "one row", "ragged", "row scale", "batched weight"])
def test_silu_mul_gemm_is_close(name: str, op_device: torch.device) -> None:
    test_silu_mul_gemm.check_close(on(op_device, silu_mul_gemm), test_silu_mul_gemm.CASES[name])


def test_gates_of_any_size_close(op_device: torch.device) -> None:
    case = test_silu_mul_gemm.CASES["ragged"]
    test_silu_mul_gemm.check_wide_gates(on(op_device, silu_mul_gemm), case)


def test_negative_gates_close(op_device: torch.device) -> None:
    test_silu_mul_gemm.check_negative_gates(on(op_device, silu_mul_gemm), 1.1e-8)


def test_nan_stays_alone(op_device: torch.device) -> None:
    test_silu_mul_gemm.check_nan(on(op_device, silu_mul_gemm))


def test_each_projection_has_its_own_alpha(op_device: torch.device) -> None:
    test_silu_mul_gemm.check_alphas(on(op_device, silu_mul_gemm))


@w4a4(test_silu_mul_gemm.CASES)
def test_quantized_is_the_float32_result_quantized(
    case: test_silu_mul_gemm.Case, op_device: torch.device
) -> None:
    check_quantized(case, op_device)


def check_quantized(
    case: test_silu_mul_gemm.Case, op_device: torch.device, out_terms: int = 1
) -> None:
    """Compare with the reference's quantisation of the kernel's own float32 values."""
    problem = test_silu_mul_gemm.make_problem(case, grid=True)
    args = {k: v for k, v in problem.args.items() if k != "out_dtype"}
    full = on(op_device, silu_mul_gemm)(**args, out_dtype=torch.float32)
    scale = (full.abs().amax() if full.numel() else torch.ones(())) / 2688
    data, scales = on(op_device, silu_mul_gemm)(**args, output=Static(scale, out_terms))
    assert_same_operand(data, scales, *quantize(full, Static(scale, out_terms)))


def assert_same_operand(data: Tensor, scales: Tensor, *expected: Tensor) -> None:
    assert torch.equal(data, expected[0])
    assert torch.equal(scales.view(torch.uint8), expected[1].view(torch.uint8))


# --- requirements of sm_100 beyond the ops' ----------------------------------------------------


def padded_weight(args: dict[str, Any]) -> Tensor:
    """The weight as a view of a wider matrix."""
    wide = torch.nn.functional.pad(args["b"], (0, 16))
    return wide[:, : args["b"].shape[1]]


def test_a_view_is_refused(op_device: torch.device) -> None:
    args = grid_problem(test_gemm.CASES["one tile"]).args
    with pytest.raises(InvalidArgument, match=r"b: strides are \(48, 1\).* call .contiguous\(\)"):
        on(op_device, lambda **given: gemm(**{**given, "b": padded_weight(given)}))(**args)


def test_an_odd_start_is_refused(op_device: torch.device) -> None:
    args = grid_problem(test_gemm.CASES["one row"]).args
    odd = torch.zeros(args["a"].numel() + 1, dtype=torch.uint8, device=op_device)[1:]
    odd = odd.view(args["a"].shape)
    with pytest.raises(InvalidArgument, match="a: starts 1 bytes after a multiple of 16"):
        on(op_device, gemm)(**{**args, "a": odd})


@pytest.mark.parametrize("op", [gemm, silu_mul_gemm])
def test_an_odd_start_of_the_result_s_scale_is_refused(
    op: Callable[..., Any], op_device: torch.device
) -> None:
    """The kernel reads the scale at its address; ``on`` would move it to an aligned one."""
    if op is gemm:
        args = grid_problem(test_gemm.CASES["one row"]).args
    else:
        args = test_silu_mul_gemm.make_problem(test_silu_mul_gemm.CASES["one row"], grid=True).args
    args |= {"out_dtype": torch.bfloat16}
    scale = torch.ones(2, device=op_device)[1]
    message = r"output\.global_scale: starts 4 bytes after .* of 16, must start at one; .*clone"
    with pytest.raises(InvalidArgument, match=message):
        on(op_device, lambda **given: op(**given, output=Static(scale)))(**args)


def test_too_many_shards_are_refused(op_device: torch.device) -> None:
    args = grid_problem(Case(5, 90, 64, shards=(10,) * 9)).args
    with pytest.raises(InvalidArgument, match="shard_sizes: 9 shards, must be at most 8 on sm_100"):
        on(op_device, gemm)(**args)
