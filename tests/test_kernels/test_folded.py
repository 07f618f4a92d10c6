"""Layout of folded weights: every bit is where the description says, every value is E4M3's nearest.

Offsets are written here from that description, in NumPy; values come from ml_dtypes.
"""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from nvfp4_kernels import InvalidArgument, StaticFp8, gemm, silu_mul_gemm
from nvfp4_kernels.formats import folded as folded_module
from nvfp4_kernels.formats.folded import (
    LARGEST_SCALE,
    MAX_ROW_ERROR,
    SMALLEST_SCALE,
    FoldedWeight,
    decode_folded,
    folded_shapes,
    to_folded,
)
from nvfp4_kernels.formats.fp8_rows import from_rows, quantize_fp8, to_rows
from nvfp4_kernels.formats.nvfp4 import quantize_weight

E4M3 = torch.float8_e4m3fn
E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)

# (N, K), whole tiles and ragged in either direction.
SHAPES = {
    "one tile": (64, 128),
    "one block": (1, 16),
    "ragged rows": (65, 128),
    "half a K tile": (64, 64),
    "ragged K": (41, 144),
    "several tiles": (192, 384),
    "ragged both": (130, 208),
}
EVERY_SHAPE = pytest.mark.parametrize(("n", "k"), SHAPES.values(), ids=SHAPES)


def codes_and_scales(n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Any codes ``(n, k)``, and scales ``(n, k/16)`` within a factor of 2¹⁰ of a row's largest."""
    rng = np.random.default_rng(n * k)
    codes = rng.integers(0, 16, (n, k), dtype=np.uint8)
    return codes, rng.integers(0x20, 0x6A, (n, k // 16), dtype=np.uint8)


def packed(codes: np.ndarray) -> Tensor:
    return torch.from_numpy(codes[:, 0::2] | codes[:, 1::2] << 4)


def e4m3(raw: np.ndarray) -> Tensor:
    return torch.from_numpy(raw).view(E4M3)


def fold(codes: np.ndarray, scales: np.ndarray) -> FoldedWeight:
    return to_folded(packed(codes), e4m3(scales))


def numbers(raw: np.ndarray) -> np.ndarray:
    return raw.view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def exponents(scales: np.ndarray) -> list[int]:
    """Largest power of two by which no scale of a row exceeds 72."""
    return [math.floor(math.log2(72 / largest)) for largest in numbers(scales).max(1)]


def stored_byte(element: int) -> int:
    """Byte of a group of 64 that holds an element, from the description of E4M3 rows."""
    c, i = divmod(element, 16)
    return 16 * (i % 8 // 2) + 4 * c + 2 * (i % 2) + i // 8


@EVERY_SHAPE
def test_every_bit_is_where_the_description_says(n: int, k: int) -> None:
    codes, scales = codes_and_scales(n, k)
    found = fold(codes, scales)
    data_shape, scales_shape = folded_shapes(n, k)
    assert (tuple(found.data.shape), tuple(found.scales.shape)) == (data_shape, scales_shape)
    data = np.zeros((*data_shape[:-1], 4), np.uint32)
    smallest = np.array(SMALLEST_SCALE, ml_dtypes.float8_e4m3fn).view(np.uint8)
    words = np.full((*scales_shape, 4), smallest, np.uint8)
    for row, exponent in enumerate(exponents(scales)):
        tile, warp, lower, g = row // 64, row % 64 // 16, row % 16 // 8, row % 8
        for column in range(k):
            across, half, inside = column // 128, column % 128 // 64, column % 64
            byte = stored_byte(inside)
            step, part, c, b = byte // 32, byte % 32 // 16, byte % 16 // 4, byte % 4
            code, number = int(codes[row, column]), 4 * part + b
            sign = 8 * b + 7 if part == 0 else 8 * b + 3
            value = (code & 7) << 4 * number | (code >> 3) << sign
            data[tile, across, half, warp, 4 * g + c, 2 * step + lower] |= np.uint32(value)
            if inside % 16 == 0:
                lifted = numbers(scales[row, column // 16]) * 2.0**exponent
                raw = int(np.array(lifted, ml_dtypes.float8_e4m3fn).view(np.uint8))
                more = int(np.array(1.5 * lifted, ml_dtypes.float8_e4m3fn).view(np.uint8)) - raw
                assert more in (4, 5)
                words[tile, across, warp, 4 * g + inside // 16, 2 * half + lower] = (
                    raw | (more == 5) << 7
                )
    np.testing.assert_array_equal(found.data.numpy(), data.astype("<u4").view(np.uint8))
    stored = found.scales.numpy().view(np.uint8).reshape(*scales_shape, 4)
    real = np.zeros(stored.shape, bool)
    real[words != smallest] = True
    np.testing.assert_array_equal(stored[real], words[real])
    assert (stored[~real] & 0x7F == smallest).all()


@EVERY_SHAPE
def test_values_are_the_nearest(n: int, k: int) -> None:
    codes, scales = codes_and_scales(n, k)
    found = fold(codes, scales)
    lifted = E2M1[codes] * np.repeat(numbers(scales), 16, 1)
    lifted *= np.exp2(np.array(exponents(scales), float))[:, None]
    nearest = lifted.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(decode_folded(found.data, found.scales, n, k).numpy(), nearest)
    np.testing.assert_array_equal(found.row_scale.numpy(), np.exp2(-np.array(exponents(scales))))
    error = np.sqrt(((nearest - lifted) ** 2).sum(1) / (lifted**2).sum(1))
    np.testing.assert_allclose(found.row_error.numpy(), error, rtol=1e-4)


def test_the_largest_scale_is_used_and_does_not_overflow() -> None:
    codes = np.tile(np.arange(16, dtype=np.uint8), (2, 1))
    scales = numbers_to_raw([[72.0], [80.0]])
    found = fold(codes, scales)
    assert found.row_scale.tolist() == [1.0, 2.0]
    values = decode_folded(found.data, found.scales, 2, 16)
    assert values.abs().max() == 448
    assert values.isfinite().all()


def test_blocks_far_below_the_largest_are_rounded_again() -> None:
    codes = np.full((1, 48), 7, np.uint8)
    scales = numbers_to_raw([[64.0, SMALLEST_SCALE / 4, 0.0]])
    found = fold(codes, scales)
    values = decode_folded(found.data, found.scales, 1, 48)[0]
    # 6 quarters of the smallest scale are nearest to E2M1's 1.5; a zero block stays zero.
    assert values[:16].eq(384).all()
    assert values[16:32].eq(1.5 * SMALLEST_SCALE).all()
    assert values[32:].eq(0).all()


def test_signs_of_scales_move_to_the_codes() -> None:
    codes = np.tile(np.arange(16, dtype=np.uint8), (1, 1))
    plus, minus = (fold(codes, numbers_to_raw([[s]])) for s in (3.0, -3.0))
    values = [decode_folded(f.data, f.scales, 1, 16) for f in (plus, minus)]
    assert torch.equal(values[0], -values[1])
    assert values[0].any()


def test_random_weights_are_folded_well() -> None:
    torch.manual_seed(0)
    weight = quantize_weight(torch.randn(256, 4096))
    errors = to_folded(weight.data, weight.scales).row_error
    assert 0.015 < errors.mean() < 0.028
    assert errors.max() < MAX_ROW_ERROR
    assert LARGEST_SCALE * 6 <= 448 * 32 / 31  # rounds to 448


def test_rounding_alone_is_within_the_bound() -> None:
    """A row of a single code with a single scale, for every code and mantissa of a scale."""
    codes = np.repeat(np.arange(1, 8, dtype=np.uint8), 8).reshape(-1, 1).repeat(16, 1)
    scales = np.tile(np.arange(8, 16), 7).reshape(-1, 1)
    error = float(fold(codes, numbers_to_raw(scales)).row_error.max())
    assert error == pytest.approx(1 / 21)
    assert error < MAX_ROW_ERROR


def test_zero_rows_have_no_error() -> None:
    found = to_folded(torch.zeros(3, 32, dtype=torch.uint8), torch.zeros(3, 4).to(E4M3))
    assert found.row_error.eq(0).all()
    assert found.row_scale.eq(1).all()


def test_stacks_are_folded_matrix_by_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [codes_and_scales(130, 208) for _ in range(2)]
    parts = [fold(*each) for each in made]
    monkeypatch.setattr(folded_module, "_AT_ONCE", 64 * 208)  # a tile of rows at a time
    stack = to_folded(
        torch.stack([packed(c) for c, _ in made]), torch.stack([e4m3(s) for _, s in made])
    )
    for index, part in enumerate(parts):
        assert all(torch.equal(whole[index], one) for whole, one in zip(stack, part, strict=True))


@pytest.mark.parametrize(
    ("data", "scales", "match"),
    [
        (torch.zeros(4, 8), torch.zeros(4, 1).to(E4M3), "data: dtype is float32"),
        (torch.zeros(4, 8, dtype=torch.uint8), torch.zeros(4, 1), "scales: dtype is float32"),
        (torch.zeros(4, 7, dtype=torch.uint8), torch.zeros(4, 1).to(E4M3), "K a multiple of 16"),
        (torch.zeros(4, 8, dtype=torch.uint8), torch.zeros(4, 2).to(E4M3), r"must be \(4, 1\)"),
        (
            torch.zeros(4, 8, dtype=torch.uint8),
            torch.full((4, 1), math.nan).to(E4M3),
            "one or more are NaN",
        ),
    ],
)
def test_refused(data: Tensor, scales: Tensor, match: str) -> None:
    with pytest.raises(InvalidArgument, match=match):
        to_folded(data, scales)


def numbers_to_raw(values: list[list[float]]) -> np.ndarray:
    return np.array(values).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


# --- products on the CPU ----------------------------------------------------------------------


@pytest.fixture
def operands() -> tuple[Tensor, FoldedWeight]:
    torch.manual_seed(0)
    weight = quantize_weight(torch.randn(96, 192))
    return torch.randn(5, 192), to_folded(weight.data, weight.scales)


def test_product_is_near_the_unquantised_product() -> None:
    torch.manual_seed(0)
    values, x = torch.randn(96, 192), torch.randn(5, 192)
    weight = quantize_weight(values)
    folded = to_folded(weight.data, weight.scales)
    scale = x.abs().max() / 448
    alpha = folded.row_scale * weight.global_scale * scale
    found = gemm(quantize_fp8(x, scale), None, folded.data, folded.scales, alpha, [96])
    exact = x @ values.T
    error = (found.float() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert 0.05 < error < 0.14  # NVFP4 alone .095


def test_pair_hands_over_e4m3(operands: tuple[Tensor, FoldedWeight]) -> None:
    x, folded = operands
    a, alpha = quantize_fp8(x, torch.tensor(0.01)), torch.stack([folded.row_scale] * 2) * 1e-4
    parts = folded.data, folded.scales, folded.data, folded.scales
    plain = silu_mul_gemm(a, None, *parts, alpha, n=96, out_dtype=torch.float32)
    scale = plain.abs().max() / 448
    quantised = silu_mul_gemm(a, None, *parts, alpha, n=96, output=StaticFp8(scale))
    assert quantised.shape == (5, 128)
    assert torch.equal(quantised.view(torch.uint8), quantize_fp8(plain, scale).view(torch.uint8))
    assert from_rows(quantised, 96).float().any()
    assert not from_rows(quantised, 128).float()[:, 96:].any()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"a": torch.zeros(5, 192)}, "a: is float32 with a folded weight"),
        ({"a": torch.zeros(5, 200).to(E4M3)}, "K padded to a positive multiple of 64"),
        ({"b": torch.zeros(2, 2, 4, 32, 16, dtype=torch.uint8)}, "b: shape is"),
        ({"alpha": torch.ones(1)}, "alpha: shape is .* one factor per row"),
        ({"row_scale": torch.ones(4)}, "row_scale: shape is"),
        ({"terms": 2}, "terms: is 2 with E4M3 activations"),
        ({"output": StaticFp8(torch.tensor(1.0))}, "output: is a StaticFp8"),
    ],
)
def test_gemm_refuses(
    operands: tuple[Tensor, FoldedWeight], change: dict[str, object], match: str
) -> None:
    x, folded = operands
    arguments: dict[str, object] = {
        "a": to_rows(x.to(E4M3)), "a_scales": None, "b": folded.data, "b_scales": folded.scales,
        "alpha": folded.row_scale, "shard_sizes": [96],
    }  # fmt: skip
    with pytest.raises(InvalidArgument, match=match):
        gemm(**(arguments | change))  # type: ignore[call-overload]


def test_pair_refuses_e4m3_of_blocked_weights() -> None:
    weight = quantize_weight(torch.randn(96, 192)).to_blocked()
    with pytest.raises(InvalidArgument, match="must be folded with int32 scales"):
        silu_mul_gemm(
            torch.zeros(5, 192).bfloat16(), None, weight.data, weight.scales, weight.data,
            weight.scales, torch.ones(2), n=96, output=StaticFp8(torch.tensor(1.0)),
        )  # type: ignore[call-overload]  # fmt: skip
