"""``quantize`` to E4M3 rows: the reference against the oracle."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nvfp4_kernels import (
    InvalidArgument,
    NoKernelError,
    PerTokenFp8,
    StaticFp8,
    add_rms_norm_quantize,
    quantize,
    rms_norm_quantize,
    silu_mul_quantize,
)
from nvfp4_kernels.devices import standing_in
from nvfp4_kernels.formats import fp8_rows
from nvfp4_kernels.formats.output import Fp8Output
from nvfp4_kernels.quantize import op as quantize_op
from tests.mutants import Mutant
from tests.mutants.kernels import check_noticed
from tests.test_kernels import fp8_oracle
from tests.test_kernels.bits import bits, check_equal
from tests.test_kernels.compilation import check_compiled, check_op
from tests.test_kernels.rowwise.row_cases import BF16, CASES, EVERY_CASE, FP16, FP32, Case

SCALE = torch.tensor(0.0173)
OUTPUTS = [StaticFp8(SCALE), PerTokenFp8()]
EVERY_OUTPUT = pytest.mark.parametrize("output", OUTPUTS, ids=["static", "per token"])


# --- the format -------------------------------------------------------------------------------


def test_order_of_the_bytes() -> None:
    """An operand of two products along K: bytes 16·q to 16·q + 15 have i = 2q, 2q+8, 2q+1, 2q+9."""
    expected = [
        16 * c + i
        for q in range(4)
        for c in range(4)
        for i in (2 * q, 2 * q + 8, 2 * q + 1, 2 * q + 9)
    ]
    assert list(fp8_rows.group_order()) == expected
    assert [fp8_oracle.byte_of(element) for element in expected] == list(range(64))


@EVERY_CASE
def test_static(case: Case) -> None:
    x = case.random()
    for scale in (SCALE, torch.tensor(0.003)):  # the second one saturates
        check_equal([quantize(x, StaticFp8(scale))], [fp8_oracle.rows(x, scale)])


@EVERY_CASE
def test_per_token(case: Case) -> None:
    x = case.random()
    scale = fp8_oracle.token_scales(x)
    check_equal(quantize(x, PerTokenFp8()), [fp8_oracle.rows(x, scale), scale])


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_every_value(dtype: torch.dtype) -> None:
    """All 16-bit values, among them NaN, infinities and subnormals, at several scales."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).view(-1, 16 * 16)
    for scale in (1.0, 0.0173, 2.0**-126, 2.0**119, 0.0, torch.inf, torch.nan):
        check_equal(
            [quantize(x, StaticFp8(torch.tensor(scale)))],
            [fp8_oracle.rows(x, torch.tensor(scale))],
        )


def test_ties_and_neighbours() -> None:
    """Midpoints of E4M3's grid round to even, their neighbours to the nearer value."""
    codes = np.arange(0x7F, dtype=np.uint8)
    grid = torch.from_numpy(codes.view(fp8_oracle.E4M3).astype(np.float32))
    midpoints = (grid[:-1] + grid[1:]) / 2
    ends = torch.tensor(1e9), torch.tensor(0.0)
    x = torch.cat([midpoints, *(midpoints.nextafter(end) for end in ends), torch.zeros(6)])
    x = torch.stack([x, -x]).view(2, -1)
    assert x.shape[-1] % 16 == 0
    check_equal(
        [quantize(x, StaticFp8(torch.tensor(1.0)))], [fp8_oracle.rows(x, torch.tensor(1.0))]
    )


def test_grid_values_survive() -> None:
    """Rows whose values E4M3 holds exactly, with a maximum of 448·2ʲ, are unchanged."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (37, 208)).astype(np.uint8)
    codes[codes % 128 == 127] = 0
    codes[:, 5] = 0x7E
    x = torch.from_numpy(codes.view(fp8_oracle.E4M3).astype(np.float32))
    per_row = torch.from_numpy(2.0 ** rng.integers(-20, 20, (37, 1))).float()
    stored, row_scale = quantize((x * per_row).to(BF16), PerTokenFp8())
    assert torch.equal(row_scale, per_row[:, 0])
    back = fp8_oracle.values(stored, row_scale, 208)
    assert np.array_equal(back, (x * per_row).double().numpy())
    assert torch.equal(fp8_rows.from_rows(stored, 208).float(), x)


def test_zeros_and_padding() -> None:
    """A row of zeros has scale 1; elements past K are zeros."""
    x = torch.zeros(3, 80, dtype=BF16)
    x[1] = -1.0
    stored, row_scale = quantize(x, PerTokenFp8())
    assert row_scale.tolist() == [1.0, pytest.approx(1 / 448), 1.0]
    assert stored.shape == (3, 128)
    assert not bits(stored)[::2].any()
    assert int((bits(stored)[1] != 0).sum()) == 80
    assert bits(stored)[1].unique().tolist() == [0, 0xFE]


@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf], ids=str)
def test_not_finite(bad: float) -> None:
    """NaN stays NaN; infinity saturates with a given scale, and makes its row's scale infinite."""
    x = torch.ones(3, 64)
    x[1, 20] = bad
    is_nan = bool(torch.tensor(bad).isnan())
    byte = fp8_oracle.byte_of(20)
    stored = quantize(x, StaticFp8(torch.tensor(1.0)))
    assert int(bits(stored)[1, byte]) == (0x7F if is_nan else 0x7E | (0x80 if bad < 0 else 0))
    stored, row_scale = quantize(x, PerTokenFp8())
    assert int(bits(stored)[1, byte]) == 0x7F
    assert row_scale[1] == (1.0 if is_nan else torch.inf)
    for row in (0, 2):
        check_equal(quantize(x[row : row + 1], PerTokenFp8()), [stored[[row]], row_scale[[row]]])


@pytest.mark.parametrize("largest", [1e-36, 1e-40, 1e-44])
def test_rows_near_the_end_of_float32_stay_finite(largest: float) -> None:
    """The reciprocal of 1e-40 / 448 would be infinite, and would make zeros NaN."""
    x = torch.zeros(2, 32)
    x[0, 0], x[1] = largest, 1.0
    stored, row_scale = quantize(x, PerTokenFp8())
    assert row_scale[0] >= 2.0**-126
    assert stored.float().isfinite().all()
    check_equal([stored], [fp8_oracle.rows(x, row_scale)])


def quantized() -> None:
    """Check values of one case with both kinds of scale."""
    test_static(CASES["ragged"])
    test_per_token(CASES["ragged"])


FORMAT_MUTANTS = {
    "elements in their order": Mutant.replaced(fp8_rows, "group_order", lambda: tuple(range(64))),
    "padding to 128": Mutant.replaced(fp8_rows, "padded", lambda k: -(-k // 128) * 128 + 64),
    "scale for an amax of 240": Mutant.replaced(fp8_rows, "FP8_MAX", 240.0),
}


@pytest.mark.parametrize("name", FORMAT_MUTANTS)
def test_mutants_of_the_format(name: str) -> None:
    check_noticed(FORMAT_MUTANTS[name], quantized)


# --- compilation and errors -------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("name", ["ragged", "batch of batches"])
def test_opcheck(name: str) -> None:
    x = CASES[name].random()
    check_op(torch.ops.nvfp4.quantize_fp8.default, (x, SCALE))
    check_op(torch.ops.nvfp4.quantize_fp8_per_token.default, (x,))


@pytest.mark.processes
@EVERY_OUTPUT
def test_compiled(output: Fp8Output) -> None:
    inputs = [replace(CASES["ragged"], m=m).random() for m in (5, 40, 128)]
    check_compiled(quantize, [((x, output), {}) for x in inputs], graphs=1)


ROWS, FACTORS = torch.zeros(2, 32), torch.ones(32)
OPS = {
    "quantize": quantize,
    "silu_mul": silu_mul_quantize,
    "rms_norm": partial(rms_norm_quantize, weight=FACTORS, eps=0.1),
    "add_rms_norm": partial(add_rms_norm_quantize, residual=ROWS, weight=FACTORS, eps=0.1),
}
EVERY_OP = pytest.mark.parametrize("op", OPS.values(), ids=OPS)


@EVERY_OUTPUT
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, 40), "x: K is 40, must be a multiple of 16; pad K with zeros"),
        (torch.zeros(32), r"x: shape is \(32,\), must have at least 2 dimensions"),
        (torch.zeros(2, 0), "x: K is 0, must be positive"),
        (torch.zeros(2, 32, dtype=torch.float64), "x: dtype is float64, must be bfloat16"),
        (torch.zeros(2, 32, dtype=torch.float8_e4m3fn), "x: dtype is float8_e4m3fn, must be bf"),
    ],
    ids=["K", "1-D", "empty", "dtype", "fp8"],
)
def test_refused_input(output: Fp8Output, x: Tensor, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        quantize(x, output)


@EVERY_OP
@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.ones(2), r"output.scale: shape is \(2,\), must be \(\); .* token: PerTokenFp8"),
        (torch.ones(1), r"output.scale: shape is \(1,\), must be \(\)"),
        (None, "output.scale: is NoneType, must be a tensor of float32"),
        (torch.tensor(1.0, dtype=BF16), "output.scale: dtype is bfloat16, must be float32"),
    ],
    ids=["per row", "1-D", "None", "dtype"],
)
def test_refused_scale(op: Callable[..., object], scale: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        op(ROWS, output=StaticFp8(scale))


@EVERY_OP
@EVERY_OUTPUT
def test_no_kernel_on_sm_100(op: Callable[..., object], output: Fp8Output) -> None:
    with (
        standing_in("cpu", "sm_100"),
        pytest.raises(NoKernelError, match=r"quantize\w*: no w4a8 kernel for cpu \(sm_100\)"),
    ):
        op(ROWS, output=output)


def test_devices() -> None:
    """Call below the dispatcher, which passes meta tensors to the fake kernel."""
    x, scale = torch.zeros(2, 32), torch.tensor(1.0)
    with pytest.raises(InvalidArgument, match=r"output\.scale: is on meta, must be"):
        quantize_op._quantize_fp8._init_fn(x, scale.to("meta"))
    with pytest.raises(NoKernelError, match="quantize: no w4a8 kernel for meta"):
        quantize_op._quantize_fp8._init_fn(x.to("meta"), scale.to("meta"))
    with pytest.raises(NoKernelError, match="quantize_per_token: no w4a8 kernel for meta"):
        quantize_op._quantize_fp8_per_token._init_fn(x.to("meta"))


def test_dtypes_of_the_results() -> None:
    stored, row_scale = quantize(torch.randn(2, 3, 48), PerTokenFp8())
    assert (stored.dtype, stored.shape) == (torch.float8_e4m3fn, (2, 3, 64))
    assert (row_scale.dtype, row_scale.shape) == (FP32, (2, 3))
