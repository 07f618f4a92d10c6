"""Attention on sm_100 at every head size: heads of each kind, causal and full, short and long."""

from itertools import product

import pytest
import torch

from nvfp4_kernels import paged_attention
from tests.test_kernels.attention.attention_cases import Case
from tests.test_kernels.attention.attention_sm100 import check

HEADS = {"MHA": (2, 2), "GQA": (4, 2), "MQA": (3, 1)}
# One query, a few, and more than a tile of 128 rows, in one batch.
QUERIES, KEYS = (1, 37, 131), (90, 37, 140)
MATRIX = {
    f"D = {head_dim}, {kind}, {'causal' if causal else 'full'}": Case(
        QUERIES, KEYS, *heads, head_dim=head_dim, causal=causal
    )
    for head_dim, (kind, heads), causal in product(
        (16, 64, 96, 128, 192, 256), HEADS.items(), (True, False)
    )
}


@pytest.mark.arch("sm_100")
@pytest.mark.schedules("random 1")
@pytest.mark.parametrize("name", MATRIX)
def test_matrix(name: str, op_device: torch.device) -> None:
    problem = MATRIX[name].problem()
    given = problem.paged()
    moved = {k: v.to(op_device) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    out, lse = paged_attention(**moved)
    check((out.cpu(), lse.cpu()), problem)
