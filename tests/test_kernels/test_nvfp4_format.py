"""The NVFP4 format: rounding, packing, quantising and dequantising."""

import math
import runpy
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvfp4_kernels import InvalidArgument, Nvfp4Tensor
from nvfp4_kernels.formats import nvfp4
from nvfp4_kernels.formats.nvfp4 import (
    Convention,
    decode_e2m1,
    encode_e2m1,
    global_scale_of,
    quantize_activation,
    quantize_weight,
    row_global_scales,
)
from tests.test_kernels import oracle
from tests.test_kernels.strategies import PROPERTY, batch_shapes, generators, k_sizes, rows

DTYPES = [torch.bfloat16, torch.float16, torch.float32]

# Magnitude -> rounded magnitude, for every tie of the grid and the values next to it.
ROUNDING = {
    0.0: 0.0,
    0.1: 0.0,
    0.25: 0.0,
    0.26: 0.5,
    0.74: 0.5,
    0.75: 1.0,
    1.0: 1.0,
    1.25: 1.0,
    1.26: 1.5,
    1.74: 1.5,
    1.75: 2.0,
    2.5: 2.0,
    2.51: 3.0,
    3.49: 3.0,
    3.5: 4.0,
    5.0: 4.0,
    5.01: 6.0,
    6.0: 6.0,
    7.0: 6.0,
    1e30: 6.0,
    math.inf: 6.0,
}


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("magnitude", ROUNDING)
def test_rounding(magnitude: float, sign: float) -> None:
    x = torch.tensor([sign * magnitude, 0.0])
    assert oracle.unpack(encode_e2m1(x))[0] == sign * ROUNDING[magnitude]


@pytest.mark.parametrize("tie", [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
def test_rounding_one_ulp_beside_a_tie(tie: float) -> None:
    at = torch.tensor([tie])
    below, above = torch.nextafter(at, torch.tensor(0.0)), torch.nextafter(at, torch.tensor(9.0))
    low, high = oracle.unpack(encode_e2m1(torch.cat([below, above])))
    grid = oracle.E2M1_GRID
    assert (low, high) == (max(v for v in grid if v < tie), min(v for v in grid if v > tie))


def test_sign_of_zero_is_kept() -> None:
    assert encode_e2m1(torch.tensor([0.0, -0.0, -0.1, 0.1])).tolist() == [0x80, 0x08]


def test_nan_rounds_to_the_largest_magnitude() -> None:
    x = torch.tensor([math.nan, -math.nan])
    np.testing.assert_array_equal(np.abs(oracle.unpack(encode_e2m1(x))), [6.0, 6.0])


def test_rounding_agrees_with_ml_dtypes() -> None:
    x = torch.cat([torch.linspace(-8, 8, 4097), torch.randn(4095) * 3])
    assert torch.equal(encode_e2m1(x), oracle.pack(x.numpy()))


def test_every_byte_decodes() -> None:
    data = torch.arange(256, dtype=torch.uint8).unsqueeze(-1)
    expected = oracle.unpack(data)
    actual = decode_e2m1(data).numpy()
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(np.signbit(actual), np.signbit(expected))


def test_low_nibble_is_the_even_element() -> None:
    assert decode_e2m1(torch.tensor([0x72], dtype=torch.uint8)).tolist() == [1.0, 6.0]
    assert encode_e2m1(torch.tensor([1.0, 6.0])).tolist() == [0x72]


def test_codes_are_not_integers() -> None:
    """Codes 5, 6 and 7 decode to 3, 4 and 6."""
    assert decode_e2m1(torch.tensor([0x65, 0xF7], dtype=torch.uint8)).tolist() == [3, 4, 6, -6]


@given(st.binary(max_size=64))
@PROPERTY
def test_encode_undoes_decode(raw: bytes) -> None:
    data = torch.tensor(list(raw), dtype=torch.uint8)
    assert torch.equal(encode_e2m1(decode_e2m1(data)), data)


@given(batch_shapes, rows, k_sizes, generators, st.sampled_from(DTYPES))
@PROPERTY
def test_quantize_weight_shapes(
    batch: tuple[int, ...], m: int, k: int, rng: np.random.Generator, dtype: torch.dtype
) -> None:
    x = torch.from_numpy(rng.standard_normal((*batch, m, k))).to(dtype)
    quantized = quantize_weight(x)
    assert quantized.shape == x.shape
    assert quantized.data.shape == (*batch, m, k // 2)
    assert quantized.scales.shape == (*batch, m, k // 16)
    assert quantized.global_scale.shape == ()
    assert quantized.to_blocked().dequantize(dtype).dtype == dtype
    # Half a step at the widest spacing, 4 to 6, and a scale rounded by at most 1/16.
    block_max = x.double().unflatten(-1, (-1, 16)).abs().amax(-1, keepdim=True)
    error = (quantized.dequantize().double() - x.double()).unflatten(-1, (-1, 16)).abs()
    assert bool((error <= block_max / 6 * (1 + 1 / 16)).all())


@given(batch_shapes, rows, k_sizes, generators)
@PROPERTY
def test_grid_values_survive_quantising(
    batch: tuple[int, ...], m: int, k: int, rng: np.random.Generator
) -> None:
    """Values that NVFP4 holds are unchanged by both quantisers."""
    codes = rng.choice(oracle.E2M1_GRID, size=(*batch, m, k // 16, 16))
    codes[..., 0] = 6.0
    exponents = rng.integers(-6, 8, size=(*batch, m, k // 16, 1)).astype(np.float64)
    x = torch.from_numpy(codes * 2.0**exponents).flatten(-2).float()
    one = torch.tensor(1.0)
    assert torch.equal(quantize_weight(x, one).dequantize(), x)
    assert torch.equal(Nvfp4Tensor(*quantize_activation(x, one), one).dequantize(), x)


@given(batch_shapes, rows, k_sizes, generators, st.booleans(), st.booleans())
@PROPERTY
def test_dequantize_against_float64(
    batch: tuple[int, ...],
    m: int,
    k: int,
    rng: np.random.Generator,
    per_row: bool,
    blocked: bool,
) -> None:
    data = torch.from_numpy(rng.integers(0, 256, (*batch, m, k // 2), dtype=np.uint8))
    scales = oracle.e4m3(2.0 ** rng.uniform(-9, 8, (*batch, m, k // 16)))
    globals_shape = (*batch, m) if per_row else ()
    global_scale = torch.from_numpy(np.asarray(2.0 ** rng.uniform(-9, 0, globals_shape))).float()
    tensor = Nvfp4Tensor(data, scales, global_scale)
    actual = (tensor.to_blocked() if blocked else tensor).dequantize()
    expected = oracle.dequantize(data, scales, global_scale.double().numpy())
    # Two float32 roundings: scale times global scale, and their product times the code.
    np.testing.assert_allclose(actual.double().numpy(), expected, rtol=2 * 2.0**-24, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize_rounds_once(dtype: torch.dtype) -> None:
    quantized = quantize_weight(torch.randn(5, 48))
    assert torch.equal(quantized.dequantize(dtype), quantized.dequantize().to(dtype))


def test_layout_conversions_keep_everything_else() -> None:
    linear = quantize_weight(torch.randn(3, 130, 80))
    blocked = linear.to_blocked()
    assert (linear.layout, blocked.layout) == ("linear", "blocked")
    assert linear.to_linear() is linear
    assert blocked.to_blocked() is blocked
    back = blocked.to_linear()
    assert back.data is linear.data
    assert back.global_scale is linear.global_scale
    assert torch.equal(back.scales.view(torch.uint8), linear.scales.view(torch.uint8))


@pytest.mark.parametrize("convention", get_args(Convention))
def test_zero_tensor(convention: Convention) -> None:
    quantized = quantize_weight(torch.zeros(3, 32), convention=convention)
    assert quantized.global_scale == 1.0
    assert not quantized.data.any()
    assert not quantized.dequantize().any()


def test_zero_block_scales() -> None:
    """Scale of a zero block: 1 for ModelOpt, 1/8 for compressed-tensors, 0 at run time."""
    x = torch.zeros(1, 32)
    x[0, 16:] = 1.0
    assert quantize_weight(x).scales[0, 0].float() == 1.0
    assert quantize_weight(x, convention="compressed-tensors").scales[0, 0].float() == 0.125
    data, scales = quantize_activation(x, global_scale_of(x))
    assert scales[0, 0].float() == 0.0
    assert not data[0, :8].any()


def test_global_scale_maps_the_maximum_to_2688() -> None:
    x = torch.tensor([[-5.25, 1.0]])
    assert global_scale_of(x) == torch.tensor(5.25) / 2688
    assert global_scale_of(torch.empty(0, 16)) == 1.0
    assert torch.equal(
        row_global_scales(torch.tensor([[2688.0, -1.0], [0.0, 0.0], [1.0, -5376.0]])),
        torch.tensor([1.0, 1.0, 2.0]),
    )


def test_given_block_scales_are_used() -> None:
    scales = torch.full((2, 2), 3.0).to(torch.float8_e4m3fn)
    quantized = quantize_weight(torch.full((2, 32), 6.0), torch.tensor(1.0), block_scales=scales)
    assert quantized.scales is scales
    assert torch.equal(quantized.dequantize(), torch.full((2, 32), 6.0))


@pytest.mark.parametrize("convention", get_args(Convention))
def test_weight_beyond_a_given_global_scale_saturates(convention: Convention) -> None:
    quantized = quantize_weight(torch.full((1, 16), -1e4), torch.tensor(1.0), convention=convention)
    assert torch.equal(quantized.dequantize(), torch.full((1, 16), -2688.0))


def test_activation_beyond_the_calibrated_range_saturates() -> None:
    x = torch.full((1, 16), -1e4)
    quantized = Nvfp4Tensor(*quantize_activation(x, torch.tensor(1.0)), torch.tensor(1.0))
    assert torch.equal(quantized.dequantize(), torch.full((1, 16), -2688.0))


def test_activation_nan_stays_visible() -> None:
    x = torch.ones(2, 32)
    x[1, 3] = math.nan
    _, scales = quantize_activation(x, torch.tensor(1.0))
    assert scales.float().isnan().tolist() == [[False, False], [True, False]]


def test_default_dtype_changes_nothing() -> None:
    """Results do not depend on torch's default dtype, which engines set while loading weights."""
    x = torch.randn(4, 64)
    before = quantize_weight(x)
    torch.set_default_dtype(torch.bfloat16)
    try:
        reloaded = runpy.run_path(nvfp4.__file__)
        after = [quantize_weight(x), reloaded["quantize_weight"](x)]
        values = [quantized.dequantize() for quantized in after]
        empty = global_scale_of(torch.empty(0, 16, dtype=torch.float16))
        decoded = decode_e2m1(before.data)
    finally:
        torch.set_default_dtype(torch.float32)
    for quantized, dequantized in zip(after, values, strict=True):
        assert torch.equal(quantized.data, before.data)
        assert torch.equal(quantized.global_scale, before.global_scale)
        assert quantized.global_scale.dtype == torch.float32
        assert torch.equal(dequantized, before.dequantize())
    assert empty.dtype == decoded.dtype == torch.float32


@pytest.mark.parametrize("k", [1, 8, 17, 40])
def test_partial_blocks_are_refused(k: int) -> None:
    with pytest.raises(InvalidArgument, match=rf"x: K is {k}, must be a multiple of 16; pad"):
        quantize_weight(torch.zeros(2, k))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_non_finite_weights_are_refused(bad: float, dtype: torch.dtype) -> None:
    x = torch.zeros(2, 32, dtype=dtype)
    x[1, 17] = bad
    with pytest.raises(InvalidArgument, match="x: holds NaN or infinity, must be finite"):
        quantize_weight(x)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_unusable_global_scales_are_refused(bad: float) -> None:
    with pytest.raises(InvalidArgument, match=r"global_scale: is .*, must be positive and finite"):
        quantize_weight(torch.ones(2, 32), torch.tensor(bad))


def test_global_scales_per_row_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"global_scale: shape is \(2,\), must be \(\)"):
        quantize_weight(torch.ones(2, 32), torch.tensor([1.0, 2.0]))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, 32, dtype=torch.float64), "x: dtype is float64, must be bfloat16, float16"),
        (torch.zeros(2, 32, dtype=torch.int8), "x: dtype is int8, must be bfloat16, float16"),
        (torch.zeros(32), r"x: shape is \(32,\), must have at least 2 dimensions .* unsqueeze it"),
    ],
    ids=["float64", "int8", "1-D"],
)
def test_unsupported_weights_are_refused(x: torch.Tensor, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        quantize_weight(x)
