"""``grouped_silu_mul_gemm`` on sm_100: every family of tiles, and activations."""

import pytest
import torch

from nvfp4_kernels import grouped_silu_mul_gemm
from nvfp4_kernels.activation import SILU, Activation
from tests.test_kernels.gemm.grouped.families import PAIR_FAMILIES, PAIRS, use
from tests.test_kernels.gemm.grouped.tiles import (
    Case,
    arguments,
    check_exact,
    check_quantized,
    of_reference,
)

pytestmark = pytest.mark.arch("sm_100")
once = pytest.mark.schedules("random 1")
# Tiles whose 16-bit results are checked; the others' results are quantised, which reads all rows.
NOT_QUANTIZED = ("swapped 8, split 8", "swapped 128, 2 CTAs", "128×64 by rows, multicast")


@pytest.mark.schedules("eager", "all late", "random 1")
@pytest.mark.parametrize("name", PAIR_FAMILIES)
def test_each_family(name: str, op_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    use(PAIR_FAMILIES[name], monkeypatch)
    check_exact(grouped_silu_mul_gemm, PAIR_FAMILIES[name].case)


@once
@pytest.mark.parametrize("name", NOT_QUANTIZED)
def test_tiles(name: str, op_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    use(PAIRS[name], monkeypatch)
    check_exact(grouped_silu_mul_gemm, PAIRS[name].case)


@once
@pytest.mark.parametrize("name", [*PAIR_FAMILIES, *sorted(PAIRS.keys() - NOT_QUANTIZED)])
def test_quantized(name: str, op_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    each = (PAIR_FAMILIES | PAIRS)[name]
    use(each, monkeypatch)
    check_quantized(grouped_silu_mul_gemm, each.case)


@once
@pytest.mark.parametrize("tile_tokens", [8, 64])
def test_quantized_to_terms(tile_tokens: int, op_device: torch.device) -> None:
    case = Case((3, 0, 9), tile_tokens, 144, 96, 2)
    check_quantized(grouped_silu_mul_gemm, case, out_terms=3)


@once
@pytest.mark.parametrize(
    "activation",
    [
        SILU,
        Activation("silu", limit=1.5),
        Activation("gelu"),
        Activation("gelu_tanh"),
        Activation("swigluoai_uninterleave", 7.0, 1.702, 1.0),
        Activation("situ", 25.0, 4.0),
        Activation("situ", None, 1.5),
        Activation("swiglustep", 1.5),
    ],
    ids=str,
)
def test_activations(activation: Activation, op_device: torch.device) -> None:
    """Results are within a few roundings of the formula's, with gates of either sign."""
    case = Case((8, 8), 8, 144, 96, 2, activation=activation, spare=0)
    args = arguments(case)
    args["b"] = args["b"].flip(1).contiguous()  # a projection of either sign for the gate
    args["b_scales"] = (
        args["b_scales"].view(torch.uint8).flip(1).contiguous().view(torch.float8_e4m3fn)
    )
    args["alpha"] = torch.tensor([[2.0**-5, 2.0**-7], [2.0**-6, 2.0**-7]])
    expected = of_reference(case, args)
    out = grouped_silu_mul_gemm(**args, out_dtype=torch.float32)
    torch.testing.assert_close(out, expected, rtol=4e-6, atol=4e-6)
    assert (expected.abs() > 0.1).any()
