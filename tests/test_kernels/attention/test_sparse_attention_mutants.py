"""Mutants of the ``sparse_attention`` reference: each fails the tests listed with it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_kernels.attention import sparse_reference
from nvfp4_kernels.attention.call import SparseCall
from tests.mutants import Mutant
from tests.mutants.kernels import check_noticed
from tests.test_kernels.attention import test_sparse_attention
from tests.test_kernels.attention.sparse_cases import CASES, LARGE_CASES

sparse_attention = sparse_reference.sparse_attention
Arguments = dict[str, Any]


def given(**changes: Callable[[Arguments], Any]) -> Callable[..., Any]:
    """Mutant: the reference with other arguments; invalid page indices wrap to valid pages."""

    def mutant(call: SparseCall) -> Any:
        named = call._asdict()
        named |= {name: change(named) for name, change in changes.items()}
        named["block_table"] = named["block_table"] % len(named["kv_cache"])
        return sparse_attention(SparseCall(**named))

    return mutant


def without_offset(named: Arguments) -> Tensor:
    size = named["kv_cache"].shape[2]
    return named["indices"] // size * size


def one_after_the_other(named: Arguments) -> Tensor:
    table = named["block_table"]
    return table.min(1, keepdim=True).values + torch.arange(table.shape[1])


MUTANTS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "offset in the page dropped": (
        given(indices=without_offset),
        ("decode", "mixed", "pages of 64"),
    ),
    "pages one after the other": (
        given(block_table=one_after_the_other),
        ("decode", "mixed", "4096 keys"),
    ),
    "the first sequence's pages": (
        given(block_table=lambda a: a["block_table"][:1].expand_as(a["block_table"])),
        ("decode", "mixed"),
    ),
    "a key too few": (given(lens=lambda a: (a["lens"] - 1).clamp(0)), ("one key", "mixed")),
    "the list of the next token": (
        given(indices=lambda a: a["indices"].roll(1, 0), lens=lambda a: a["lens"].roll(1, 0)),
        ("decode", "many tokens"),
    ),
    "key scale left out": (given(k_scale=lambda _: None), ("fp8", "fp8 everything")),
    "value scale left out": (given(v_scale=lambda _: None), ("fp8", "fp8, long")),
    "the sink left out": (given(sinks=lambda _: None), ("sinks", "empty lists but sinks")),
}


@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name, (_, cases) in MUTANTS.items() for case in cases]
)
def test_mutant_is_found(name: str, case: str) -> None:
    mutant = Mutant.replaced(sparse_reference, "sparse_attention", MUTANTS[name][0])
    check_noticed(mutant, partial(test_sparse_attention.test_cases, (CASES | LARGE_CASES)[case]))
