"""``quantize``: activations to NVFP4 with blocked scales."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nvfp4_kernels import (
    InvalidArgument,
    NoKernelError,
    Nvfp4Tensor,
    PerToken,
    Static,
    add_rms_norm_quantize,
    gemm,
    quantize,
    rms_norm_quantize,
    silu_mul_quantize,
)
from nvfp4_kernels.formats.nvfp4 import global_scale_of
from nvfp4_kernels.quantize import op as quantize_op
from tests.test_kernels import oracle
from tests.test_kernels.compilation import check_compiled, check_op
from tests.test_kernels.vllm_reference import quantize_with_vllm

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Case:
    m: int
    k: int
    batch: tuple[int, ...] = ()
    dtype: torch.dtype = BF16

    def random(self) -> Tensor:
        return torch.randn(*self.batch, self.m, self.k).to(self.dtype)


CASES = {
    "one tile": Case(128, 64),
    "one block": Case(1, 16),
    "one row": Case(1, 1024),
    "no rows": Case(0, 64),
    "ragged": Case(131, 80),
    "odd number of blocks": Case(5, 16 * 13),
    "several row tiles": Case(300, 192),
    "fp16": Case(33, 96, dtype=FP16),
    "fp32": Case(33, 96, dtype=FP32),
    "batch": Case(5, 48, batch=(3,)),
    "batch of batches": Case(130, 48, batch=(2, 3), dtype=FP32),
    "empty batch": Case(5, 48, batch=(0,)),
    "Llama 3 8B hidden": Case(17, 4096),
    "DeepSeek V3 hidden": Case(3, 7168),
}
OUTPUTS = [Static(torch.tensor(1.0)), PerToken()]
EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def check_against_vllm(x: Tensor, data: Tensor, scales: Tensor, global_scale: Tensor) -> None:
    """Check codes and scales against vLLM's reference, with blocked scales and zero padding."""
    values, linear = quantize_with_vllm(x, global_scale)
    np.testing.assert_array_equal(oracle.unpack(data), values)
    assert scales.dtype == torch.float8_e4m3fn
    assert torch.equal(scales.view(torch.uint8), oracle.blocked(linear).view(torch.uint8))


@EVERY_CASE
@pytest.mark.parametrize("calibrated", [1.0, 0.25], ids=["calibrated", "saturating"])
def test_quantize(case: Case, calibrated: float) -> None:
    x = case.random()
    global_scale = global_scale_of(x) * calibrated
    check_against_vllm(x, *quantize(x, Static(global_scale)), global_scale)


@EVERY_CASE
def test_quantize_per_token(case: Case) -> None:
    x = case.random()
    data, scales, row_scale = quantize(x, PerToken())
    assert row_scale.dtype == FP32
    assert torch.equal(row_scale, x.abs().amax(-1).float() / 2688)
    check_against_vllm(x, data, scales, row_scale)


@EVERY_CASE
def test_grid_values_survive(case: Case) -> None:
    """Rows with a maximum of 2688·2ʲ whose values NVFP4 holds exactly are unchanged."""
    rng = np.random.default_rng(0)
    codes = rng.choice(oracle.E2M1_GRID, (*case.batch, case.m, case.k // 16, 16))
    codes[..., 0] = 6.0
    scales = 2.0 ** rng.integers(0, 8, (*case.batch, case.m, case.k // 16, 1))
    scales[..., 0, :] = 448.0
    per_row = 2.0 ** rng.integers(-9, 2, (*case.batch, case.m, 1, 1))
    x = torch.from_numpy(codes * scales).flatten(-2).to(case.dtype)
    one = torch.tensor(1.0)
    back = Nvfp4Tensor(*quantize(x, Static(one)), one, "blocked").dequantize(case.dtype)
    assert torch.equal(back, x)
    x = torch.from_numpy(codes * scales * per_row).flatten(-2).to(case.dtype)
    back = Nvfp4Tensor(*quantize(x, PerToken()), "blocked").dequantize(case.dtype)
    assert torch.equal(back, x)


def test_per_token_row_scales_fit_gemm() -> None:
    """Rows of very different magnitudes keep their relative accuracy through the product."""
    x = torch.randn(6, 256) * 10.0 ** torch.arange(-6, 6, 2).unsqueeze(-1)
    data, scales, row_scale = quantize(x, PerToken())
    identity = torch.eye(256, dtype=torch.float64).numpy()
    weight = oracle.operand(identity, oracle.e4m3(np.ones((256, 16))))
    back = gemm(
        data, scales, weight.data, weight.scales, torch.ones(1), [256],
        row_scale=row_scale, out_dtype=FP32,
    )  # fmt: skip
    # The row scale multiplies either the product or the block scale: two roundings on each side.
    dequantized = Nvfp4Tensor(data, scales, row_scale, "blocked").dequantize()
    torch.testing.assert_close(back, dequantized, rtol=4 * 2.0**-24, atol=0)
    error = (back - x).square().sum(-1) / x.square().sum(-1)
    assert bool((error < 0.02).all())


def test_zero_rows() -> None:
    x = torch.zeros(3, 64, dtype=BF16)
    x[1] = 1.0
    data, scales, row_scale = quantize(x, PerToken())
    assert row_scale.tolist() == [1.0, pytest.approx(1 / 2688), 1.0]
    back = Nvfp4Tensor(data, scales, row_scale, "blocked").dequantize()
    assert torch.equal(back != 0, x != 0)
    data, scales = quantize(torch.zeros_like(x), Static(torch.tensor(0.01)))
    assert not data.any()
    assert not scales.view(torch.uint8).any()


@pytest.mark.parametrize("largest", [1e-36, 1e-40, 1e-44])
def test_rows_near_the_end_of_float32_stay_finite(largest: float) -> None:
    """The reciprocal of 1e-36 / 2688 would be infinite, and would make zero blocks NaN."""
    x = torch.zeros(2, 32)
    x[0, 0], x[1] = largest, 1.0
    data, scales, row_scale = quantize(x, PerToken())
    assert Nvfp4Tensor(data, scales, row_scale, "blocked").dequantize().isfinite().all()


# --- compilation and errors -------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("name", ["ragged", "batch of batches"])
def test_opcheck(name: str) -> None:
    x = CASES[name].random()
    for terms in (1, 3):
        check_op(torch.ops.nvfp4.quantize.default, (x, torch.tensor(0.01), terms))
        check_op(torch.ops.nvfp4.quantize_per_token.default, (x, terms))


@pytest.mark.processes
@pytest.mark.parametrize("name", ["ragged", "batch of batches"])
def test_compiled(name: str) -> None:
    inputs = [replace(CASES[name], m=m).random() for m in (5, 40, 128)]
    scale = torch.tensor(0.01)
    for output in (Static(scale), PerToken()):
        check_compiled(quantize, [((x, output), {}) for x in inputs], graphs=1)
    # Terms share one row of atoms up to 32 rows: that size is specialised.
    check_compiled(quantize, [((x, Static(scale, 3)), {}) for x in inputs], graphs=2)


def test_compiled_with_the_product() -> None:
    """One graph up to 128 rows, another beyond: a single row of atoms is specialised."""
    weight = oracle.random_operand(np.random.default_rng(0), 130, 96)
    alpha, scale = torch.tensor([1e-3]), torch.tensor(0.01)

    def layer(x: Tensor) -> Tensor:
        return gemm(*quantize(x, Static(scale)), weight.data, weight.scales, alpha, [130])

    inputs = [torch.randn(m, 96, dtype=BF16) for m in (5, 40, 130, 300)]
    check_compiled(layer, [((x,), {}) for x in inputs], graphs=2)


ROWS, FACTORS = torch.zeros(2, 32), torch.ones(32)
OPS = [
    quantize,
    silu_mul_quantize,
    partial(rms_norm_quantize, weight=FACTORS, eps=0.1),
    partial(add_rms_norm_quantize, residual=ROWS, weight=FACTORS, eps=0.1),
]
OP_NAMES = ["quantize", "silu_mul", "rms_norm", "add_rms_norm"]


@pytest.mark.parametrize("output", OUTPUTS, ids=["static", "per token"])
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, 40), "x: K is 40, must be a multiple of 16; pad K with zeros"),
        (torch.zeros(32), r"x: shape is \(32,\), must have at least 2 dimensions"),
        (torch.zeros(2, 32, dtype=torch.float64), "x: dtype is float64, must be bfloat16"),
    ],
    ids=["K", "1-D", "dtype"],
)
def test_refused_input(output: Static | PerToken, x: Tensor, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        quantize(x, output)


@pytest.mark.parametrize(
    ("global_scale", "message"),
    [
        (torch.ones(2), r"output.global_scale: shape is \(2,\), must be \(\); .* token: PerToken"),
        (torch.ones(1), r"output.global_scale: shape is \(1,\), must be \(\)"),
        (None, "output.global_scale: is NoneType, must be a tensor of float32"),
        (torch.tensor(1.0, dtype=BF16), "output.global_scale: dtype is bfloat16, must be float32"),
    ],
    ids=["per row", "1-D", "None", "dtype"],
)
@pytest.mark.parametrize("op", OPS, ids=OP_NAMES)
def test_refused_global_scale(op: Callable[..., object], global_scale: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        op(ROWS, output=Static(global_scale))


@pytest.mark.parametrize("terms", [0, 5, -1])
@pytest.mark.parametrize("make", [lambda t: Static(torch.tensor(1.0), t), PerToken])
@pytest.mark.parametrize("op", OPS, ids=OP_NAMES)
def test_refused_terms(
    op: Callable[..., object], make: Callable[[int], Static | PerToken], terms: int
) -> None:
    with pytest.raises(InvalidArgument, match=f"output.terms: is {terms}, must be 1 to 4"):
        op(ROWS, output=make(terms))


@pytest.mark.parametrize(
    ("output", "came"),
    [(None, "None"), (torch.tensor(0.01), "a Tensor"), (0.01, "a float"), (PerToken, "a type")],
    ids=["None", "a scale", "a number", "the class"],
)
@pytest.mark.parametrize("op", OPS, ids=OP_NAMES)
def test_refused_output(op: Callable[..., object], output: object, came: str) -> None:
    accepted = (
        r"must be Static\(global_scale, terms\), PerToken\(terms\), StaticFp8\(scale\) or "
        r"PerTokenFp8\(\)"
    )
    with pytest.raises(InvalidArgument, match=f"^output: is {came}, {accepted}$"):
        op(ROWS, output=output)


def test_devices() -> None:
    """Call below the dispatcher, which passes meta tensors to the fake kernel."""
    x, scale = torch.zeros(2, 32), torch.tensor(1.0)
    with pytest.raises(InvalidArgument, match=r"output\.global_scale: is on meta, must be"):
        quantize_op._quantize._init_fn(x, scale.to("meta"), 1)
    there_is = (
        r"no w4a4 kernel for meta \(meta\); there is nvfp4_quantize/reference \(cpu\), "
        r"nvfp4_quantize_w4a8/reference \(cpu\), nvfp4_quantize_w4a8/QuantizeFp8Sm90 \(sm_90\), "
        r"nvfp4_quantize/QuantizeSm100 \(sm_100\); run on"
    )
    with pytest.raises(NoKernelError, match=there_is):
        quantize_op._quantize._init_fn(x.to("meta"), scale.to("meta"), 1)
    with pytest.raises(NoKernelError, match="quantize_per_token: no w4a4 kernel for meta"):
        quantize_op._quantize_per_token._init_fn(x.to("meta"), 1)


def test_the_smallest_rows_keep_their_zeros() -> None:
    """The step of a block needs a finite reciprocal: otherwise zeros become NaN."""
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16] = 2.0**-140, 2.0**-148
    data, _, row_scale = quantize(x, PerToken())
    assert row_scale.item() == 2.0**-118
    assert not data.any()
