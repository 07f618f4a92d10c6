"""Ops that quantise keep zero rows, and the largest and smallest rows, in any number of terms."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nvfp4_kernels.formats.nvfp4 import row_global_scales
from nvfp4_kernels.formats.output import PerToken
from nvfp4_kernels.formats.terms import decode_terms
from nvfp4_kernels.norm.call import AddRmsNormCall
from nvfp4_kernels.norm.reference import add_rms_norm, rms_norm
from nvfp4_kernels.quantize import reference as quantizing
from nvfp4_kernels.quantize.call import QuantizeCall, RmsNormQuantizeCall, SiluMulQuantizeCall
from nvfp4_kernels.quantize.rms_norm import reference as norms
from nvfp4_kernels.quantize.silu_mul import reference as activations
from tests.extreme_values import inputs, rounding

K, EPS = 96, 1e-6
WEIGHT = torch.linspace(0.5, 1.5, K).bfloat16()

# Per-token op, and the 16-bit result that the op quantises.
Op = tuple[Callable[[Tensor, int], tuple[Tensor, ...]], Callable[[Tensor], Tensor]]


def pairs(x: Tensor) -> Tensor:
    """Gate and up, each row paired with the row before; at most one of the two is 1e30."""
    return torch.cat([x, x.roll(1, 0)], dim=-1)


def normed(x: Tensor, residual: Tensor | None, terms: int) -> tuple[Tensor, ...]:
    return norms.rms_norm_quantize(RmsNormQuantizeCall(x, residual, WEIGHT, EPS, PerToken(terms)))


OPS: dict[str, Op] = {
    "quantize": (
        lambda x, terms: quantizing.quantize(QuantizeCall(x, PerToken(terms))),
        lambda x: x,
    ),
    "norm": (
        lambda x, terms: normed(x, None, terms),
        lambda x: rms_norm(x.float(), WEIGHT, EPS, x.dtype),
    ),
    "residual and norm": (
        lambda x, terms: normed(x, x, terms)[:3],
        lambda x: add_rms_norm(AddRmsNormCall(x, x, WEIGHT, EPS))[0],
    ),
    "activation": (
        lambda x, terms: activations.silu_mul_quantize(
            SiluMulQuantizeCall(pairs(x), PerToken(terms))
        ),
        lambda x: activations.silu_mul(pairs(x)),
    ),
}


@pytest.mark.parametrize("terms", [1, 2, 3])
@pytest.mark.parametrize("op", OPS)
def test_rows_of_any_size_keep_their_values(op: str, terms: int) -> None:
    torch.manual_seed(0)
    x = inputs(K).bfloat16()
    run, unfused = OPS[op]
    data, scales, row_scale = run(x, terms)
    plain = unfused(x).double()
    assert bool(torch.isfinite(plain).all())
    assert bool((torch.isfinite(row_scale) & (row_scale > 0)).all())
    value = decode_terms(data, scales, terms).double() * row_scale.double().unsqueeze(-1)
    off = (value - plain).abs()
    assert bool((off <= rounding(plain, row_scale)).all())
    if terms > 1:  # the residual is quantised again, with a block scale of at least 2^-9
        blocks = plain.unflatten(-1, (-1, 16)).abs().amax(-1).repeat_interleave(16, -1)
        floor = 2.0**-9 * row_scale.double().unsqueeze(-1)
        assert bool((off <= torch.maximum(blocks * 0.25**terms, floor)).all())
    zero = ~plain.any(-1)
    assert bool(zero.any())
    assert not value[zero].any()


@pytest.mark.parametrize("exponent", range(-133, 128, 9))
def test_a_row_of_any_magnitude_is_scaled_or_below_float32_s_normal_numbers(exponent: int) -> None:
    """Global scales from 2^-118 down lose values below 2^-126, the end of tensor cores' range."""
    torch.manual_seed(0)
    x = (torch.rand(3, K) + 0.5).mul(2.0**exponent).bfloat16()
    data, scales, row_scale = quantizing.quantize(QuantizeCall(x, PerToken()))
    assert torch.equal(row_scale, row_global_scales(x))
    value = decode_terms(data, scales, 1).double() * row_scale.double().unsqueeze(-1)
    bound = rounding(x.double(), row_scale)
    assert bool(((value - x.double()).abs() <= bound).all())
    assert float(bound.max()) < float(x.abs().max()) / 4 or exponent < -120
