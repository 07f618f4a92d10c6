"""The polynomial for 2^x in sm_100 attention: its error, and the resulting error of the LSE."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from nvfp4_kernels import paged_attention
from nvfp4_kernels.attention.sm100.polynomials import EXP2
from nvfp4_kernels.attention.sm100.tile import AttentionTile
from tests.test_kernels.attention.attention_cases import Case
from tests.test_kernels.attention.attention_sm100 import Chosen, lse_error, quantized_queries
from tests.test_kernels.attention.test_attention_sm100 import on

E4M3_PREFILL = AttentionTile(128, 2, fp8=True)
OTHERS = (AttentionTile(128, 2), AttentionTile(128, fp8=True, warp_split_kv=True))


def test_only_prefill_over_e4m3_has_the_lower_degree() -> None:
    """The polynomial's error is below 1/600 of P's rounding error."""
    assert E4M3_PREFILL.exp2_error < 2.0**-4 / 600
    assert {tile.exp2_error for tile in OTHERS} == {2.9e-6}


@pytest.mark.parametrize("tile", [E4M3_PREFILL, *OTHERS], ids=str)
def test_polynomial(tile: AttentionTile) -> None:
    """Horner's rule in float32, with products and sums fused, stays within the stated error."""
    *lower, highest = np.float32(EXP2[tile.exp2_degree].coefficients)
    rest = np.linspace(-0.5, 0.5, 1 << 20, dtype=np.float32)
    found = np.full_like(rest, highest)
    for coefficient in reversed(lower):
        found = (found.astype(np.float64) * rest + coefficient).astype(np.float32)
    off = np.abs(found / np.exp2(rest.astype(np.float64)) - 1).max()
    assert 0.95 * tile.exp2_error < off <= tile.exp2_error
    assert lower[0] == 1.0  # the largest probability is exact


@pytest.mark.arch("sm_100")
@pytest.mark.schedules("random 1")
@pytest.mark.parametrize("emulated", [0, 16], ids=["MUFU", "FMA"])
def test_lse_of_prefill_over_e4m3(
    emulated: int, op_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The LSE is off by at most the polynomial's error; with MUFU by less."""
    chosen = Chosen(AttentionTile(128, 2, fp8=True, emulated_exp2=emulated))
    chosen.use(monkeypatch)
    problem = Case((140,), (400,), 2, 1, 128, fp8=True).problem()
    _, lse = paged_attention(**on(op_device, problem.paged()))
    _, log = replace(problem, q=quantized_queries(problem)).formula()
    off = float((lse.cpu().double().view(log.shape) - log).abs().max())
    assert off <= (lse_error(problem) if emulated else 1e-5) + 1e-6 * float(log.abs().max())
