"""Cases of scoring fused with top-k on sm_100, with small buffers, and checks of the keys."""

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from nvfp4_kernels.indexer.sm100.best_keys.choose import Choice
from nvfp4_kernels.indexer.sm100.best_keys.tile import Selection
from nvfp4_kernels.indexer.sm100.choose import ScoreProblem
from nvfp4_kernels.indexer.sm100.tile import ScoreTile
from tests.test_kernels.indexer import topk_cases
from tests.test_kernels.indexer.indexer_cases import Case, Problem, run_score_topk
from tests.test_kernels.indexer.indexer_oracle import Stored
from tests.test_kernels.indexer.indexer_sm100 import on
from tests.test_kernels.oracle import Float64, float64

HEAD_DIM = 64
Row = NDArray[np.float32]


def chosen(
    tile: ScoreTile, capacity: int, sync_phases: int = 1, words: int = 256, splits: int = 1
) -> Choice:
    """Choice of a tile and ``splits``; with several splits a CTA sees a share of a row's keys.

    For ``capacity``, ``sync_phases`` and ``words`` see ``Selection``.
    """
    selection = Selection(capacity, sync_phases, words, whole=splits == 1)
    return Choice(replace(tile, visitor_bytes=selection.shared_bytes(tile)), selection, splits)


@dataclass(frozen=True)
class Use:
    """Replacement of ``choose_config`` that returns ``choice``."""

    choice: Choice

    def __call__(self, problem: ScoreProblem, top_k: int, sms: int) -> Choice:
        tile = self.choice.tile
        assert (problem.fmt, problem.head_dim) == (tile.fmt, tile.head_dim)
        assert problem.num_heads == tile.num_heads
        assert top_k <= self.choice.selection.max_entries(tile)
        return self.choice


def use(patch: pytest.MonkeyPatch, choice: Choice) -> None:
    """Make the ops use ``choice``, and merge the candidates of splits by few threads.

    Call this inside the emulator, to which imports bind CuTe DSL.
    """
    topk_cases.use(patch, topk_cases.PAIR)
    module = import_module("nvfp4_kernels.indexer.sm100.best_keys.launch")
    patch.setattr(module, "choose_config", Use(choice))


def scored(rows: list[Row], top_k: int, next_n: int = 1, scale: float = 1.0) -> Problem:
    """Problem whose scores are the given values, rounded to bfloat16.

    Two heads see the same element with opposite signs: their relus are the positive and negative
    half of a number. The queries of a sequence see its keys with weights 1, -1, 1, ... times
    ``scale``; the first query sees one key less than the second, and so on.
    """
    keys = [_stored(np.pad(row[:, None], ((0, 0), (0, HEAD_DIM - 1)))) for row in rows]
    q = np.zeros((len(rows), next_n, 2, HEAD_DIM), dtype=np.float32)
    q[:, :, 0, 0], q[:, :, 1, 0] = 1, -1
    signs = np.where(np.arange(next_n) % 2, -scale, scale)
    weights = np.tile(np.stack([signs, -signs], -1), (len(rows), 1))
    lens = tuple(tuple(max(len(row) - n, 0) for n in reversed(range(next_n))) for row in rows)
    case = Case(lens, heads=2, head_dim=HEAD_DIM, block_size=64, top_k=top_k, next_n=next_n)
    return Problem(case, "bf16", _stored(q), keys, weights)


def _stored(values: Row) -> Stored:
    data = torch.from_numpy(values).bfloat16()
    return Stored(data, None, float64(data))


def best(row: Float64, top_k: int) -> list[int]:
    """Top-k of a row, equal to the oracle's but fast enough for long rows."""
    values = np.where(np.isnan(row), -np.inf, row)
    order = np.lexsort((np.arange(len(row)), -values))
    return sorted(order[:top_k].tolist())


def check(found: tuple[Tensor, Tensor], rows: list[Float64], top_k: int) -> None:
    """Compare with the oracle's top-k of the keys that each row sees."""
    indices, valid = found
    assert indices.dtype == valid.dtype == torch.int32
    assert indices.shape == (len(rows), top_k)
    for number, row in enumerate(rows):
        expected = best(row, top_k)
        padded = expected + [-1] * (top_k - len(expected))
        assert indices[number].tolist() == padded, f"row {number}"
        assert valid[number] == len(expected), f"row {number}"


def run_paged(problem: Problem, device: torch.device, **changed: Any) -> None:
    """Run a problem with paged keys, and compare the result with the oracle's."""
    top_k = problem.case.top_k
    arguments = on(device, problem.paged() | changed)
    with np.errstate(invalid="ignore"):
        check(run_score_topk(**arguments, top_k=top_k), problem.expected(), top_k)


def run_contiguous(problem: Problem, device: torch.device) -> None:
    """Run a problem with contiguous keys, and compare the result with the oracle's."""
    top_k = problem.case.top_k
    arguments = on(device, problem.contiguous())
    with np.errstate(invalid="ignore"):
        check(run_score_topk(**arguments, top_k=top_k), problem.expected(), top_k)
