"""The indexer on sm_100 with enough keys to wrap around ring and accumulators, for each family."""

from dataclasses import replace

import pytest
import torch

from nvfp4_kernels.indexer.sm100.tile import ScoreTile
from tests.test_kernels.indexer import best_keys_cases
from tests.test_kernels.indexer.indexer_cases import Case
from tests.test_kernels.indexer.indexer_sm100 import Chosen, run_contiguous, run_paged
from tests.test_kernels.rounds import indexer_sm100

pytestmark = [pytest.mark.arch("sm_100"), pytest.mark.schedules("random 1")]

TILES = {
    "nvfp4, ping-pong": ScoreTile("nvfp4", 64, 16, pingpong=2, max_stages=3),
    "mxfp4": ScoreTile("mxfp4", 64, 16, max_stages=3),
    "fp8, groups": ScoreTile("fp8", 64, 16, groups=3, max_stages=3),
    "bf16": ScoreTile("bf16", 64, 16, max_stages=4),
}
KEYS = 1600
CAPACITY = 640


@pytest.mark.parametrize("name", TILES)
def test_scores(name: str, op_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    tile = TILES[name]
    assert indexer_sm100(tile, KEYS).enough
    Chosen(tile).use(monkeypatch)
    problem = Case(((KEYS,),), heads=16, block_size=64).problem(tile.fmt)
    run_paged(problem, op_device)
    run_contiguous(problem, op_device)


@pytest.mark.parametrize("name", TILES)
def test_best_keys(name: str, op_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = best_keys_cases.chosen(TILES[name], CAPACITY)
    # Candidate buffers leave less shared memory, but not fewer stages.
    assert replace(choice.tile, visitor_bytes=0) == TILES[name]
    assert indexer_sm100(choice.tile, KEYS).enough
    best_keys_cases.use(monkeypatch, choice)
    problem = Case(((KEYS,),), heads=16, block_size=64, top_k=50).problem(TILES[name].fmt)
    best_keys_cases.run_paged(problem, op_device)
