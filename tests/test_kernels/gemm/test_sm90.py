"""``gemm``, ``gemv`` and ``silu_mul_gemm`` on sm_90: 16-bit tokens, weights in fragments."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nvfp4_kernels import InvalidArgument, gemm, gemv, silu_mul_gemm
from nvfp4_kernels.formats.fragments import to_fragments
from nvfp4_kernels.formats.nvfp4 import BLOCK_SIZE, from_blocked
from tests.test_kernels.gemm.linear_cases import (
    Case,
    LinearOp,
    check_close,
    check_exact,
    grid_problem,
    rounding_error,
)
from tests.test_kernels.gemm.silu_mul import test_silu_mul_gemm

pytestmark = [pytest.mark.arch("sm_90"), pytest.mark.schedules("random 1")]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

CASES = {
    "one token": Case(1, 128, 64, a_dtype=BF16, out_dtype=BF16),
    "one block": Case(1, 16, 16, a_dtype=BF16),
    "no tokens": Case(0, 128, 64, a_dtype=BF16),
    "8 tokens, K in parts": Case(8, 256, 1024, a_dtype=BF16, out_dtype=BF16),
    "8 tokens, four slices of a long K": Case(8, 100, 14336, a_dtype=BF16, out_dtype=BF16),
    "8 tokens, parts of 3 and 4 stages": Case(8, 72, 7168, a_dtype=BF16, out_dtype=BF16),
    "16 tokens, two slices, shards": Case(
        16, 96, 4096, shards=(64, 32), bias=BF16, a_dtype=BF16, out_dtype=BF16
    ),
    "9 tokens, odd N": Case(9, 133, 144, a_dtype=BF16, out_dtype=BF16),
    "odd number of K tiles": Case(5, 192, 64 * 7, a_dtype=BF16, out_dtype=BF16),
    "17 tokens": Case(17, 128, 256, a_dtype=BF16, out_dtype=BF16),
    "64 tokens in boxes": Case(64, 128, 128, a_dtype=BF16, out_dtype=BF16),
    "65 tokens, ragged": Case(65, 200, 80, a_dtype=BF16, out_dtype=BF16),
    "130 tokens, odd N": Case(130, 77, 96, a_dtype=BF16, out_dtype=BF16),
    "300 tokens": Case(300, 328, 192, a_dtype=BF16, out_dtype=BF16),
    "shards": Case(3, 176, 96, shards=(64, 72, 40), a_dtype=BF16, out_dtype=BF16),
    "shards, many tokens": Case(70, 176, 96, shards=(64, 72, 40), a_dtype=BF16, out_dtype=BF16),
    "bias": Case(3, 144, 96, bias=BF16, a_dtype=BF16, out_dtype=BF16),
    "float32 bias, many tokens": Case(66, 144, 96, bias=FP32, a_dtype=BF16, out_dtype=BF16),
    "fp16": Case(7, 144, 96, a_dtype=FP16, out_dtype=FP16),
    "fp16, many tokens": Case(80, 144, 96, bias=FP16, a_dtype=FP16, out_dtype=FP16),
    "float32 out": Case(5, 144, 96, a_dtype=BF16),
    "float32 out, many tokens": Case(80, 144, 96, a_dtype=FP16),
    "batch": Case(5, 144, 48, batch=(3,), a_dtype=BF16, out_dtype=BF16),
}
EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
# Layers of real models, at every tile, for a GPU.
LAYERS = {
    f"{m} x {n} x {k}": Case(m, n, k, a_dtype=BF16, out_dtype=BF16)
    for n, k in (
        (6144, 4096), (4096, 4096), (4096, 14336), (2560, 8192), (8192, 2048), (8192, 7168),
    )
    for m in (1, 16, 32, 64, 80, 160, 320, 448, 1000)
}  # fmt: skip


def in_fragments(device: torch.device, op: Callable[..., Any]) -> LinearOp:
    """``op`` on ``device``: takes a blocked weight, returns a CPU tensor."""

    def run(**args: Any) -> Tensor:
        names = [name for name in ("b", "b1", "b2") if name in args]
        for name in names:
            data, blocked = args[name], args[f"{name}_scales"]
            n, k = data.shape[0], 2 * data.shape[1]
            weight = to_fragments(data, from_blocked(blocked, n, k // BLOCK_SIZE))
            args = {**args, name: weight.data, f"{name}_scales": weight.scales}
            if name == "b1":
                args["n"] = n
        moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in args.items()}
        return op(**moved).cpu()

    return run


@EVERY_CASE
def test_gemm_is_exact(case: Case, op_device: torch.device) -> None:
    check_exact(in_fragments(op_device, gemm), case)


@pytest.mark.parametrize("name", ["8 tokens, K in parts", "batch", "bias", "17 tokens"])
def test_gemv_is_exact(name: str, op_device: torch.device) -> None:
    check_exact(in_fragments(op_device, gemv), CASES[name])


@pytest.mark.parametrize("name", ["9 tokens, odd N", "65 tokens, ragged", "fp16, many tokens"])
def test_gemm_is_close(name: str, op_device: torch.device) -> None:
    check_close(in_fragments(op_device, gemm), CASES[name])


@pytest.mark.parametrize("case", LAYERS.values(), ids=LAYERS)
def test_layers(case: Case, op_device: torch.device) -> None:
    if op_device.type != "cuda":
        pytest.skip("needs a CUDA device: hours in the emulator")
    check_exact(in_fragments(op_device, gemm), case)
    check_close(in_fragments(op_device, gemm), case)


SILU_CASES = {
    "one token": Case(1, 128, 64, a_dtype=BF16, out_dtype=BF16),
    "8 tokens, K in parts": Case(8, 192, 512, a_dtype=BF16, out_dtype=BF16),
    "odd N": Case(16, 77, 96, a_dtype=BF16, out_dtype=BF16),
    "33 tokens": Case(33, 128, 64, a_dtype=BF16, out_dtype=BF16),
    "64 tokens in boxes": Case(64, 128, 128, a_dtype=BF16, out_dtype=BF16),
    "150 tokens, ragged": Case(150, 200, 80, a_dtype=BF16, out_dtype=BF16),
    "fp16": Case(70, 144, 96, a_dtype=FP16, out_dtype=FP16),
    "float32 out": Case(5, 144, 96, a_dtype=BF16),
    "batch": Case(5, 144, 48, batch=(3,), a_dtype=BF16, out_dtype=BF16),
}


@pytest.mark.parametrize("case", SILU_CASES.values(), ids=SILU_CASES)
def test_pair_is_exact(case: Case, op_device: torch.device) -> None:
    test_silu_mul_gemm.check_exact(in_fragments(op_device, silu_mul_gemm), case)


@pytest.mark.parametrize("case", SILU_CASES.values(), ids=SILU_CASES)
def test_pair_is_close(case: Case, op_device: torch.device) -> None:
    test_silu_mul_gemm.check_close(in_fragments(op_device, silu_mul_gemm), case)


def test_alphas(op_device: torch.device) -> None:
    problem = test_silu_mul_gemm.make_problem(SILU_CASES["one token"], grid=True)
    op = in_fragments(op_device, silu_mul_gemm)
    args = {**problem.args, "alpha": problem.args["alpha"] * torch.tensor([-16.0, 1.0])}
    assert op(**problem.args).any()
    assert not op(**args).any()


def test_repeats_are_the_same_bits(op_device: torch.device) -> None:
    """Split-K partials are added in a fixed order, whichever CTA comes first."""
    case = CASES["8 tokens, K in parts"]
    problem = grid_problem(case)
    op = in_fragments(op_device, gemm)
    noise = {**problem.args, "a": torch.randn(case.m, case.k).bfloat16()}
    first = op(**noise)
    times = 20 if op_device.type == "cuda" else 2
    assert all(torch.equal(op(**noise), first) for _ in range(times))


def test_nan_and_infinity_stay_in_their_rows(op_device: torch.device) -> None:
    for m in (3, 80):
        problem = grid_problem(Case(m, 128, 80, a_dtype=BF16, out_dtype=BF16))
        problem.args["a"][1, 5] = torch.nan
        out = in_fragments(op_device, gemm)(**problem.args)
        assert out[1].isnan().all()
        right = problem.expected()[[0, 2]]
        assert (
            np.abs(out[[0, 2]].double().numpy() - right) <= rounding_error(np.abs(right), BF16)
        ).all()


@pytest.mark.parametrize("name", ["a", "alpha"])
def test_what_is_not_aligned_is_refused(name: str, op_device: torch.device) -> None:
    problem = grid_problem(CASES["one token"])
    given = problem.args[name]
    # Made where it is used: a copy to another device would be aligned anew.
    shifted = torch.empty(given.numel() + 1, dtype=given.dtype, device=op_device)[1:]
    shifted = shifted.view(given.shape).copy_(given)
    with pytest.raises(InvalidArgument, match=f"{name}: starts .* after a multiple of 16"):
        in_fragments(op_device, gemm)(**{**problem.args, name: shifted})


def test_too_many_shards_are_refused(op_device: torch.device) -> None:
    case = Case(3, 144, 64, shards=(16,) * 9, a_dtype=BF16, out_dtype=BF16)
    with pytest.raises(InvalidArgument, match="shard_sizes: 9 shards, must be at most 8 on sm_90"):
        in_fragments(op_device, gemm)(**grid_problem(case).args)
