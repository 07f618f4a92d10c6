"""``silu_mul_quantize`` to E4M3 rows: the reference against vLLM and the oracle."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from vllm.model_executor.layers.activation import SiluAndMul

from nvfp4_kernels import InvalidArgument, NoKernelError, PerTokenFp8, StaticFp8, silu_mul_quantize
from nvfp4_kernels.formats.output import Fp8Output
from nvfp4_kernels.quantize.silu_mul import op as silu_op
from tests.test_kernels import fp8_oracle
from tests.test_kernels.bits import check_equal
from tests.test_kernels.compilation import check_compiled, check_op
from tests.test_kernels.rowwise.row_cases import CASES, EVERY_CASE, Case

SCALE = torch.tensor(0.0173)
EVERY_OUTPUT = pytest.mark.parametrize(
    "output", [StaticFp8(SCALE), PerTokenFp8()], ids=["static", "per token"]
)


def random_input(case: Case) -> Tensor:
    return 4 * replace(case, k=2 * case.k).random()


# --- the formula ------------------------------------------------------------------------------


@EVERY_CASE
def test_reference(case: Case) -> None:
    x = random_input(case)
    product = SiluAndMul.forward_native(x)
    check_equal([silu_mul_quantize(x, StaticFp8(SCALE))], [fp8_oracle.rows(product, SCALE)])
    scales = fp8_oracle.token_scales(product)
    check_equal(silu_mul_quantize(x, PerTokenFp8()), [fp8_oracle.rows(product, scales), scales])


# --- compilation and errors -------------------------------------------------------------------


@pytest.mark.processes
def test_opcheck() -> None:
    x = random_input(CASES["batch of batches"])
    check_op(torch.ops.nvfp4.silu_mul_quantize_fp8.default, (x, SCALE))
    check_op(torch.ops.nvfp4.silu_mul_quantize_fp8_per_token.default, (x,))


@EVERY_OUTPUT
def test_compiled(output: Fp8Output) -> None:
    inputs = [random_input(replace(CASES["ragged"], m=m)) for m in (5, 40, 128)]
    check_compiled(silu_mul_quantize, [((x, output), {}) for x in inputs], graphs=1)


@EVERY_OUTPUT
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, 48), "gate_up: last dimension is 48, must be a multiple of 32: gate and"),
        (torch.zeros(32), r"gate_up: shape is \(32,\), must have at least 2 dimensions"),
        (torch.zeros(2, 0), "gate_up: K is 0, must be positive"),
        (torch.zeros(2, 32, dtype=torch.float64), "gate_up: dtype is float64, must be bfloat16"),
    ],
    ids=["width", "1-D", "empty", "dtype"],
)
def test_refused_input(output: Fp8Output, x: Tensor, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        silu_mul_quantize(x, output)


def test_devices() -> None:
    x = torch.zeros(2, 32)
    with pytest.raises(InvalidArgument, match=r"output\.scale: is on meta, must be"):
        silu_op._silu_mul_quantize_fp8._init_fn(x, SCALE.to("meta"))
    with pytest.raises(NoKernelError, match="silu_mul_quantize_per_token: no w4a8 kernel for meta"):
        silu_op._silu_mul_quantize_fp8_per_token._init_fn(x.to("meta"))
