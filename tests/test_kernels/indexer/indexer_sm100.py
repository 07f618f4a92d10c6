"""Runs of the sm_100 scoring kernel with a given tile, and comparisons of the scores."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nvfp4_kernels.indexer.sm100.choose import ScoreProblem
from nvfp4_kernels.indexer.sm100.tile import ScoreTile
from tests.test_kernels.indexer.indexer_cases import Problem, run_logits


def on(device: torch.device, arguments: dict[str, Any]) -> dict[str, Any]:
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in arguments.items()}


def check(found: Tensor, problem: Problem, firsts: list[int] | None = None) -> None:
    """Compare bit for bit: rows hold the scores from their first key on, and −inf elsewhere."""
    expected = problem.expected()
    wanted = np.full(found.shape, -np.inf)
    for row, values in enumerate(expected):
        first = 0 if firsts is None else firsts[row]
        wanted[row, first : first + len(values)] = values
    np.testing.assert_array_equal(found.cpu().double().numpy(), wanted)


def run_paged(problem: Problem, device: torch.device, **changed: Any) -> Tensor:
    """Run a problem with paged keys, compare the scores with the oracle's, and return them."""
    found = run_logits(**on(device, problem.paged(**changed)))
    check(found, problem)
    return found


def run_contiguous(problem: Problem, device: torch.device) -> Tensor:
    """Run a problem with contiguous keys, compare the scores with the oracle's, and return them."""
    arguments = problem.contiguous()
    found = run_logits(**on(device, arguments))
    check(found, problem, arguments["ks"].tolist())
    return found


@dataclass(frozen=True)
class Chosen:
    """Tile and number of splits that replace the result of ``choose_config``."""

    tile: ScoreTile
    splits: int = 1

    def __call__(self, problem: ScoreProblem, sms: int) -> tuple[ScoreTile, int]:
        assert (problem.fmt, problem.head_dim) == (self.tile.fmt, self.tile.head_dim)
        assert problem.num_heads == self.tile.num_heads
        return self.tile, self.splits

    def use(self, patch: pytest.MonkeyPatch) -> None:
        """Make the ops use this tile. Call inside the emulator, to which imports bind CuTe DSL."""
        patch.setattr(
            import_module("nvfp4_kernels.indexer.sm100.launch_logits"), "choose_config", self
        )
