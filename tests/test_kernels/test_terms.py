"""Sums of NVFP4 terms: format, errors, limits."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nvfp4_kernels import InvalidArgument, PerToken, Static, gemm, quantize, silu_mul_gemm
from nvfp4_kernels.formats.nvfp4 import quantize_activation, row_global_scales, to_blocked
from nvfp4_kernels.formats.terms import (
    decode_terms,
    quantize_terms,
    stack_scales,
    term_rows,
    unstack_scales,
)
from tests.test_kernels import oracle

ONE = torch.tensor(1.0)


def relative_error(x: Tensor, terms: int, scale: Tensor) -> float:
    """RMS of the quantisation error, relative to the RMS of ``x``."""
    decoded = decode_terms(*quantize_terms(x, scale, terms), terms)
    decoded *= scale.unsqueeze(-1) if scale.ndim else scale
    return float((decoded - x).square().mean().sqrt() / x.square().mean().sqrt())


def gauss() -> Tensor:
    return torch.randn(64, 4096)


def student() -> Tensor:
    return torch.distributions.StudentT(4.0).sample((64, 4096))


# Bounds for 64 × 4096 values: the measured errors, plus 5 %.
LOST = {1: 0.1, 2: 0.0092, 3: 0.00083, 4: 0.000077}


@pytest.mark.parametrize("make", [gauss, student], ids=["Gauss", "Student t4"])
def test_each_term_divides_what_is_lost_by_eleven(make: object) -> None:
    x = make()  # type: ignore[operator]
    scale = x.abs().amax() / 2688
    lost = {terms: relative_error(x, terms, scale) for terms in LOST}
    assert all(lost[terms] < bound for terms, bound in LOST.items()), lost
    assert all(lost[a] / lost[b] > 9 for a, b in pairwise(LOST)), lost
    rounded = x.bfloat16().float() - x
    assert lost[3] < 0.5 * float(rounded.square().mean().sqrt() / x.square().mean().sqrt())


def test_a_scale_eight_times_too_large_costs_nothing_up_to_three_terms() -> None:
    x = gauss()
    scale = x.abs().amax() / 2688
    for terms in (1, 2, 3):
        assert relative_error(x, terms, 8 * scale) < 1.02 * relative_error(x, terms, scale)


def test_later_terms_take_what_the_first_one_clips() -> None:
    x = gauss()
    scale = x.abs().amax() / 2688 / 2
    clipped = relative_error(x, 1, scale)
    assert relative_error(x, 2, scale) < clipped / 5
    assert relative_error(x, 3, scale) < clipped / 50


def test_outliers_by_a_scale_per_token() -> None:
    """Per-token scales keep the accuracy of other channels if a few are 3000 times larger."""
    x = gauss()
    ordinary = torch.ones(4096, dtype=torch.bool)
    for channel in (5, 2050):
        x[:, channel] *= 3000
        ordinary[channel // 16 * 16 :][:16] = False  # an outlier's block loses its other elements

    def lost(scale: Tensor, terms: int) -> float:
        decoded = decode_terms(*quantize_terms(x, scale, terms), terms) * scale.unsqueeze(-1)
        error = (decoded - x)[:, ordinary]
        return float(error.square().mean().sqrt() / x[:, ordinary].square().mean().sqrt())

    per_token = row_global_scales(x)
    whole = (x.abs().amax() / 2688).expand(64)
    assert lost(per_token, 2) < 0.0092
    assert lost(per_token, 3) < 0.00115  # .00165 if block scales could be zero
    assert lost(whole, 3) < 0.0014  # .0049


@pytest.mark.parametrize("magnitude", [2.0**-10, 2.0**-12, 2.0**-20, 0.0], ids=str)
def test_below_the_smallest_block_scale(magnitude: float) -> None:
    """Below the smallest scale, blocks become coarse and then zero, with zero scales and codes."""
    x = torch.randn(3, 64) * magnitude
    data, scales = quantize(x, Static(ONE, 4))
    decoded = decode_terms(data, scales, 4)
    assert decoded.isfinite().all()
    assert float((decoded - x).abs().max()) <= 2.0**-11  # a quarter of the smallest step
    if magnitude == 0.0:
        assert not (data & 0x77).any()
        assert not scales.view(torch.uint8).any()


def test_what_is_exact_leaves_nothing() -> None:
    """E2M1 values times a power of two leave a second term of zero codes."""
    x = torch.from_numpy(oracle.grid_operand(np.random.default_rng(0), 40, 64).values).float()
    x[..., ::16] = 6.0 * x.abs().amax() / 6.0
    data, _ = quantize(x, Static(ONE, 2))
    exact = decode_terms(*quantize(x, Static(ONE, 1)), 1) == x
    blocks = exact.unflatten(-1, (-1, 16)).all(-1)
    assert blocks.any()
    second = data[1].unflatten(-1, (-1, 8))
    assert not (second[blocks] & 0x77).any()


@given(
    rows=st.sampled_from([1, 5, 31, 32, 33, 127, 128, 129]),
    columns=st.integers(1, 9),
    terms=st.integers(2, 4),
    batch=st.sampled_from([(), (2,)]),
)
def test_stacked_scales(rows: int, columns: int, terms: int, batch: tuple[int, ...]) -> None:
    """Stacked scales equal the oracle's, and unstack to the same scales."""
    shape = (*batch, terms, rows, columns)
    scales = torch.randint(1, 120, shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
    blocked = stack_scales(scales)
    expected = oracle.blocked(oracle.stacked(scales))
    assert torch.equal(blocked.view(torch.uint8), expected.view(torch.uint8))
    back = unstack_scales(blocked, terms, rows, columns)
    assert torch.equal(back.view(torch.uint8), scales.view(torch.uint8))


def test_few_rows_share_an_atom() -> None:
    assert [term_rows(rows) for rows in (1, 32, 33, 128, 129)] == [32, 32, 128, 128, 256]
    assert quantize(torch.ones(32, 64), Static(ONE, 4))[1].shape == (1, 1, 32, 16)
    assert quantize(torch.ones(33, 64), Static(ONE, 4))[1].shape == (4, 1, 32, 16)


def test_each_term_is_what_the_ones_before_left() -> None:
    """Each term quantises the residual of the terms before, formed in float64."""
    x = torch.randn(37, 96)
    scale = x.abs().amax() / 2688
    data, scales = quantize(x, Static(scale, 3))
    linear = unstack_scales(scales, 3, 37, 6)
    left = x.double()
    for term in range(3):
        expected = quantize_activation(left.float(), scale, 2.0**-9 if term else 0.0)
        assert torch.equal(data[term], expected[0])
        assert torch.equal(linear[term].view(torch.uint8), expected[1].view(torch.uint8))
        step = expected[1].float() * scale.reciprocal().reciprocal()
        codes = torch.from_numpy(oracle.unpack(expected[0]))
        left = left.float().double() - codes * step.double().repeat_interleave(16, -1)


def test_one_term_is_what_it_always_was() -> None:
    x = torch.randn(37, 96)
    data, scales = quantize(x, Static(ONE, 1))
    expected = quantize_activation(x, ONE)
    assert torch.equal(data, expected[0])
    assert torch.equal(scales.view(torch.uint8), to_blocked(expected[1]).view(torch.uint8))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_not_finite_stays_visible(bad: float) -> None:
    """NaN shows in the scales of all terms, infinity as the largest value in all terms."""
    x = torch.randn(5, 64)
    x[3, 20] = bad
    data, scales = quantize(x, Static(torch.tensor(0.01), 3))
    linear = unstack_scales(scales, 3, 5, 4).float()
    block = linear[:, 3, 1]
    assert bool(block.isnan().all() if bad != bad else (block == 448).all())
    others = torch.ones(5, 4, dtype=torch.bool)
    others[3, 1] = False
    assert linear[:, others].isfinite().all()
    assert data.shape == (3, 5, 32)


# --- errors -----------------------------------------------------------------------------------

X = torch.randn(5, 64)
WEIGHT = oracle.grid_operand(np.random.default_rng(0), 32, 64)


@pytest.mark.parametrize("terms", [0, 5, -1])
def test_refused_numbers(terms: int) -> None:
    for call in (lambda: quantize(X, Static(ONE, terms)), lambda: quantize(X, PerToken(terms))):
        with pytest.raises(InvalidArgument, match=f"terms: is {terms}, must be 1 to 4; 3 lose"):
            call()


def test_refused_operands() -> None:
    data, scales = quantize(X, Static(ONE, 3))
    weight = (WEIGHT.data, WEIGHT.scales, torch.ones(1), [32])
    with pytest.raises(InvalidArgument, match=r"a: shape is \(3, 5, 32\), must be \(.*, 2, row"):
        gemm(data, scales, *weight, terms=2)
    with pytest.raises(InvalidArgument, match=r"a_scales: shape is .*stack_scales\(\)"):
        gemm(data, to_blocked(torch.ones(3, 5, 4).to(torch.float8_e4m3fn)), *weight, terms=3)
    with pytest.raises(InvalidArgument, match=r"a_scales: shape is \(1, 1, 32, 16\), must be \(3"):
        gemm(data, scales, *weight)
    with pytest.raises(InvalidArgument, match="terms: is 3 with 16-bit activations, must be 1"):
        gemm(X.bfloat16(), None, *weight, terms=3)
    with pytest.raises(InvalidArgument, match=r"row_scale: shape is \(3, 5\), must be \(5,\)"):
        gemm(data, scales, *weight, terms=3, row_scale=torch.ones(3, 5))
    pair = (WEIGHT.data, WEIGHT.scales, WEIGHT.data, WEIGHT.scales, torch.ones(2))
    with pytest.raises(InvalidArgument, match="terms: is 9, must be 1 to 4"):
        silu_mul_gemm(data, scales, *pair, terms=9)
