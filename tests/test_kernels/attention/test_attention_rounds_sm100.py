"""Attention on sm_100 with enough keys to wrap around its ring and S, for each family of tiles."""

import pytest
import torch

from nvfp4_kernels import paged_attention, sparse_attention
from nvfp4_kernels.attention.sm100.tile import AttentionTile
from tests.test_kernels.attention.attention_cases import Case
from tests.test_kernels.attention.attention_sm100 import Chosen, check
from tests.test_kernels.attention.sparse_cases import SparseCase
from tests.test_kernels.attention.test_attention_sm100 import on
from tests.test_kernels.rounds import attention_sm100

pytestmark = [pytest.mark.arch("sm_100"), pytest.mark.schedules("random 1")]

FEW = {"query_heads": 2, "heads": 1}
# More than a tile of 128 rows.
MANY = {"queries": (70,), **FEW}
CASES = {
    "one query tile": (Chosen(AttentionTile(64, max_stages=3)), Case((3,), (680,), **FEW)),
    "one query tile, fp8": (
        Chosen(AttentionTile(64, fp8=True, max_stages=3)),
        Case((3,), (680,), fp8=True, **FEW),
    ),
    "two to an SM": (
        Chosen(AttentionTile(64, ctas_per_sm=2, max_stages=2)),
        Case((3,), (400,), **FEW),
    ),
    "splits": (Chosen(AttentionTile(64, max_stages=3), 2), Case((3,), (1500,), **FEW)),
    "warp split": (
        Chosen(AttentionTile(64, warp_split_kv=True, max_stages=3)),
        Case((3,), (680,), **FEW),
    ),
    "warp split, fp8": (
        Chosen(AttentionTile(64, warp_split_kv=True, fp8=True, max_stages=3)),
        Case((3,), (680,), fp8=True, **FEW),
    ),
    "two query tiles": (
        Chosen(AttentionTile(64, 2, max_stages=3)),
        Case(keys=(600,), **MANY),
    ),
    "two query tiles, P in S": (
        Chosen(AttentionTile(128, 2, max_stages=2)),
        Case(keys=(400,), head_dim=128, **MANY),
    ),
    "two query tiles, fp8": (
        Chosen(AttentionTile(128, 2, fp8=True, max_stages=2)),
        Case(keys=(400,), head_dim=128, fp8=True, **MANY),
    ),
    "lists": (
        Chosen(AttentionTile(64, max_stages=3)),
        SparseCase((1,), (700,), listed=(680,), width=680, **FEW),
    ),
    "lists, two to an SM": (
        Chosen(AttentionTile(64, ctas_per_sm=2, max_stages=2)),
        SparseCase((1,), (420,), listed=(400,), width=400, **FEW),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_rounds(name: str, op_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every query sees enough keys to wrap around several times, and the results are right."""
    chosen, case = CASES[name]
    keys = case.listed[0] if isinstance(case, SparseCase) else case.keys[0] - case.queries[0] + 1
    rounds = attention_sm100(chosen.tile, keys, chosen.splits)
    assert rounds.enough, rounds
    chosen.use(monkeypatch)
    if isinstance(case, SparseCase):
        sparse = case.problem()
        check(sparse_attention(**on(op_device, sparse.sparse())), sparse)
    else:
        problem = case.problem()
        check(paged_attention(**on(op_device, problem.paged())), problem)
