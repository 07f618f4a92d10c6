"""Norms that quantise to E4M3 rows: the reference against vLLM and the oracle."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from vllm import ir

from nvfp4_kernels import (
    InvalidArgument,
    NoKernelError,
    PerTokenFp8,
    StaticFp8,
    add_rms_norm_quantize,
    rms_norm_quantize,
)
from nvfp4_kernels.quantize.rms_norm import op as rms_norm_op
from nvfp4_kernels.quantize.rms_norm.arguments import Form
from tests.test_kernels import fp8_oracle
from tests.test_kernels.bits import check_equal
from tests.test_kernels.compilation import check_compiled, check_op
from tests.test_kernels.rowwise.row_cases import BF16, CASES, EVERY_CASE, FP32, Case

EPS = 1e-5
SCALE = torch.tensor(0.0071)


def random_weight(case: Case, dtype: torch.dtype | None = None) -> Tensor:
    return (1 + torch.randn(case.k) / 8).to(dtype or case.dtype)


# --- the formula ------------------------------------------------------------------------------


@EVERY_CASE
@pytest.mark.parametrize("weight_dtype", [None, FP32], ids=["own dtype", "fp32 weight"])
def test_reference(case: Case, weight_dtype: torch.dtype | None) -> None:
    x, residual, weight = case.random(), case.random(), random_weight(case, weight_dtype)
    norm = ir.ops.rms_norm.impls["native"].impl_fn(x, weight, EPS)
    scales = fp8_oracle.token_scales(norm)
    check_equal(
        [rms_norm_quantize(x, weight, EPS, StaticFp8(SCALE))], [fp8_oracle.rows(norm, SCALE)]
    )
    check_equal(
        rms_norm_quantize(x, weight, EPS, PerTokenFp8()), [fp8_oracle.rows(norm, scales), scales]
    )
    norm, total = ir.ops.fused_add_rms_norm.impls["native"].impl_fn(x, residual, weight, EPS)
    scales = fp8_oracle.token_scales(norm)
    found = add_rms_norm_quantize(x, residual, weight, EPS, StaticFp8(SCALE))
    check_equal(found, (fp8_oracle.rows(norm, SCALE), total))
    found_per_token = add_rms_norm_quantize(x, residual, weight, EPS, PerTokenFp8())
    check_equal(found_per_token, (fp8_oracle.rows(norm, scales), scales, total))


# --- compilation and errors -------------------------------------------------------------------


@pytest.mark.processes
def test_opcheck() -> None:
    case = CASES["batch of batches"]
    x, weight, ops = case.random(), random_weight(case), torch.ops.nvfp4
    check_op(ops.rms_norm_quantize_fp8.default, (x, weight, EPS, SCALE))
    check_op(ops.rms_norm_quantize_fp8_per_token.default, (x, weight, EPS))
    check_op(ops.add_rms_norm_quantize_fp8.default, (x, x.clone(), weight, EPS, SCALE))
    check_op(ops.add_rms_norm_quantize_fp8_per_token.default, (x, x.clone(), weight, EPS))


@pytest.mark.parametrize("output", [StaticFp8(SCALE), PerTokenFp8()], ids=["static", "per token"])
def test_compiled(output: StaticFp8 | PerTokenFp8) -> None:
    weight = random_weight(CASES["ragged"])

    def layer(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        *quantized, total = add_rms_norm_quantize(x, residual, weight, 1e-5, output)
        again = rms_norm_quantize(total, weight, 1e-5, output)
        return (*quantized, total, *([again] if isinstance(again, Tensor) else again))

    inputs = [replace(CASES["ragged"], m=m).random() for m in (5, 40, 128)]
    check_compiled(layer, [((x, x.clone()), {}) for x in inputs], graphs=1)


def test_devices() -> None:
    x, weight = torch.zeros(2, 32, dtype=BF16), torch.ones(32, dtype=BF16)
    meta = x.to("meta"), weight.to("meta")
    static, per_token = (
        rms_norm_op._OPS[Form(adds=False, per_token=p, fp8=True)] for p in (False, True)
    )
    with pytest.raises(InvalidArgument, match="weight: is on meta, must be on cpu as x is"):
        static._init_fn(x, meta[1], EPS, SCALE)
    with pytest.raises(InvalidArgument, match=r"output\.scale: is on meta, must be"):
        static._init_fn(x, weight, EPS, SCALE.to("meta"))
    with pytest.raises(NoKernelError, match="rms_norm_quantize_per_token: no w4a8 kernel for meta"):
        per_token._init_fn(*meta, EPS)
