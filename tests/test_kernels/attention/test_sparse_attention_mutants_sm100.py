"""Mutants of gathering listed keys: each mutant is reported, or its results are wrong."""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch

from nvfp4_kernels import sparse_attention
from nvfp4_kernels.attention.sm100.tile import AttentionTile
from tests.mutants import ANYTHING, WRONG, Mutant
from tests.mutants.kernels import Room, check_caught, check_nothing_to_catch
from tests.test_kernels.attention.attention_sm100 import Chosen, check
from tests.test_kernels.attention.sparse_cases import SparseCase

KERNEL = Room("nvfp4_kernels.attention.sm100")

# Five key tiles, so that every prefetched tile is used; lists that end within a gather.
CASE = SparseCase(
    (1, 2), (600, 140), query_heads=1, heads=1, head_dim=16, listed=(523, 126, 7), width=526
)
CHOSEN = Chosen(AttentionTile(16))


def without_row_step(lists: Any) -> Any:
    strides = lists.map_strides
    return replace(lists, map_strides=strides._replace(row=type(strides.row)(0)))


def all_columns(work_tile: Callable[..., Any]) -> Callable[..., Any]:
    def whole(tile: Any, variant: Any, sizes: Any, *rest: Any) -> Any:
        return replace(work_tile(tile, variant, sizes, *rest), keys=sizes.keys)

    return whole


def tokens_for_sequences(patch: pytest.MonkeyPatch) -> None:
    loader = import_module("nvfp4_kernels.attention.sm100.loader").TmaLoader
    KERNEL.replaced(GATHER_LOADER, "_page_table", loader._page_table)(patch)


GATHER_LOADER = "gather_loader:GatherLoader"
MUTANTS = {
    "the token's row of the table": Mutant(tokens_for_sequences, ANYTHING),
    "offset in the page dropped": Mutant(
        KERNEL.with_result("kernel", "KeyLists", without_row_step), WRONG
    ),
    "values in another order than keys": Mutant(
        KERNEL.with_arguments(GATHER_LOADER, "_load_values", lambda *a: (*a[:5], a[5][::-1], a[6])),
        WRONG,
    ),
    "prefetch of a tile too many": Mutant(KERNEL.replaced("loader", "PREFETCH", 4), WRONG),
    "rows past the end read": Mutant(KERNEL.replaced("gather_loader", "OUT_OF_BOUNDS", 0), WRONG),
    "lens ignored": Mutant(KERNEL.swapped("kernel", "work_tile", all_columns), "OutOfBounds"),
    "the tail not masked": Mutant(
        KERNEL.with_arguments(
            "softmax:Softmax", "_mask", lambda scores, b, e: (scores, b, e + 999)
        ),
        WRONG,
    ),
}


def check_sparse() -> None:
    problem = CASE.problem()
    arguments = problem.sparse()
    # The first page belongs to no sequence.
    cache = arguments["kv_cache"]
    arguments["kv_cache"] = torch.cat([torch.full_like(cache[:1], torch.nan), cache])
    arguments["block_table"] += 1
    check(sparse_attention(**arguments), problem)


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_caught(mutant: Mutant) -> None:
    check_caught(mutant, check_sparse, CHOSEN.use)


def test_nothing_to_catch() -> None:
    check_nothing_to_catch(check_sparse, CHOSEN.use)
