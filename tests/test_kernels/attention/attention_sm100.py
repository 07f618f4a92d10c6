"""Error bounds of the sm_100 attention kernel, and a way to run it with a given tile."""

from dataclasses import dataclass, replace
from importlib import import_module

import pytest
import torch
from torch import Tensor

from nvfp4_kernels.attention.sm100.choose import AttentionProblem
from nvfp4_kernels.attention.sm100.tile import AttentionTile
from tests.test_kernels.attention.attention_cases import FP8, Problem, check_values

Result = tuple[Tensor, Tensor]
E4M3_HALF_ULP = 2.0**-4
E4M3_MAX = 448.0
# Largest relative error of an exponential, with an E4M3 cache and without.
EXP2_ERROR = {fp8: AttentionTile(128, 2, fp8).exp2_error for fp8 in (True, False)}


def quantized_queries(problem: Problem) -> Tensor:
    """Q as the kernel rounds it for an E4M3 cache: with a scale per row."""
    largest = problem.q.float().abs().amax(-1, keepdim=True)
    scale = torch.where(largest > 0, largest * (1 / E4M3_MAX), 1.0)
    codes = (problem.q.float() * (1.0 / scale)).clamp(-E4M3_MAX, E4M3_MAX).to(FP8)
    return codes.double() * scale.double()


def lse_error(problem: Problem) -> float:
    """Bound on the LSE's absolute error, besides 1e-6 relative: from float32 sums and from exp2."""
    return 1e-5 + (EXP2_ERROR[True] if problem.case.fp8 else 0.0)


def check(found: Result, problem: Problem) -> None:
    """Check against the formula; the LSE may have float32 sums' error and ``EXP2_ERROR``.

    O has the exp2 error twice: in P, and in the sum by which P is divided.
    """
    out, lse = found
    if problem.case.fp8:
        problem = replace(problem, q=quantized_queries(problem))
    _, log = problem.formula()
    assert not lse.isnan().any()
    torch.testing.assert_close(
        lse.double().view(log.shape), log, rtol=1e-6, atol=lse_error(problem)
    )
    weight = torch.finfo(problem.case.dtype).eps / 2
    if problem.case.fp8:
        weight = E4M3_HALF_ULP + 2 * EXP2_ERROR[True]
    check_values(out, problem, weight)


@dataclass(frozen=True)
class Chosen:
    """A tile and a number of splits that replace the result of ``choose_config``."""

    tile: AttentionTile
    splits: int = 1

    def __call__(self, problem: AttentionProblem, sms: int) -> tuple[AttentionTile, int]:
        assert problem.head_dim == self.tile.head_dim
        assert problem.fp8 == self.tile.fp8
        return self.tile, self.splits

    def use(self, patch: pytest.MonkeyPatch) -> None:
        """Make the ops use this tile. Call inside the emulator, to which imports bind CuTe DSL."""
        patch.setattr(import_module("nvfp4_kernels.attention.sm100.launch"), "choose_config", self)
