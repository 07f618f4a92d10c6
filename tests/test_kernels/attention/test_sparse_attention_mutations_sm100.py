"""Mistakes made on purpose in gathering listed keys: each reported or seen in the numbers."""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch

from nvfp4_kernels import compile as kernel_compile
from nvfp4_kernels import sparse_attention
from nvfp4_kernels.attention.sm100.tile import AttentionTile
from tests import devices
from tests.emulator import STANDARD, EmulatorError
from tests.test_kernels.attention.attention_sm100 import Chosen, check
from tests.test_kernels.attention.sparse_cases import SparseCase
from tests.test_kernels.attention.test_attention_mutations_sm100 import replaced, with_arguments
from tests.test_kernels.gemm.test_mutations_sm100 import Patch

# Five key tiles, so that all that is prefetched is used; lists that end within a gather.
CASE = SparseCase(
    (1, 2), (600, 140), query_heads=1, heads=1, head_dim=16, listed=(523, 126, 7), width=526
)
CHOSEN = Chosen(AttentionTile(16))


def through(module: str, name: str, change: Callable[..., Any]) -> Patch:
    """``change`` of a module's function, and of what that is given, in its place."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        found = import_module(f"nvfp4_kernels.attention.sm100.{module}")
        given = getattr(found, name)
        patch.setattr(found, name, lambda *arguments: change(given, *arguments))

    return apply


def without_row_step(lists: Callable[..., Any], *given: Any) -> Any:
    right = lists(*given)
    strides = right.map_strides
    return replace(right, map_strides=strides._replace(row=type(strides.row)(0)))


def all_columns(
    work_tile: Callable[..., Any], tile: Any, variant: Any, sizes: Any, *rest: Any
) -> Any:
    return replace(work_tile(tile, variant, sizes, *rest), keys=sizes.keys)


def tokens_for_sequences(patch: pytest.MonkeyPatch) -> None:
    loader = import_module("nvfp4_kernels.attention.sm100.loader").TmaLoader
    replaced("gather_loader.GatherLoader", "_page_table", loader._page_table)(patch)


GATHER_LOADER = "gather_loader.GatherLoader"
# What is changed, and what says so: a finding's class, or "wrong numbers".
MISTAKES: dict[str, tuple[Patch, str]] = {
    "the token's row of the table": (tokens_for_sequences, ""),
    "offset in the page dropped": (
        through("kernel", "KeyLists", without_row_step),
        "wrong numbers",
    ),
    "values in another order than keys": (
        with_arguments(GATHER_LOADER, "_load_values", lambda *a: (*a[:5], a[5][::-1], a[6])),
        "wrong numbers",
    ),
    "prefetch of a tile too many": (replaced("loader", "PREFETCH", 4), "wrong numbers"),
    "rows past the end read": (replaced("gather_loader", "OUT_OF_BOUNDS", 0), "wrong numbers"),
    "lens ignored": (through("kernel", "work_tile", all_columns), "OutOfBounds"),
    "the tail not masked": (
        with_arguments("softmax.Softmax", "_mask", lambda scores, b, e: (scores, b, e + 999)),
        "wrong numbers",
    ),
}


def outcome() -> str:
    """The first thing that is noticed, over all schedules."""
    problem = CASE.problem()
    arguments = problem.sparse()
    # The first page is nobody's.
    cache = arguments["kv_cache"]
    arguments["kv_cache"] = torch.cat([torch.full_like(cache[:1], torch.nan), cache])
    arguments["block_table"] += 1
    for schedule in STANDARD:
        with devices.emulated_ops(schedule):
            try:
                check(sparse_attention(**arguments), problem)
            except EmulatorError as finding:
                return type(finding).__name__
            except AssertionError:
                return "wrong numbers"
    return "nothing"


@pytest.mark.parametrize("name", MISTAKES)
def test_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    devices.cutlass_or_skip()
    patch, caught = MISTAKES[name]
    with devices.emulated_ops(STANDARD[0]):
        patch(monkeypatch)
        CHOSEN.use(monkeypatch)
    kernel_compile.compiled.cache_clear()
    try:
        noticed = outcome()
    finally:
        kernel_compile.compiled.cache_clear()
    print(f"{name}: {noticed}")
    assert noticed != "nothing"
    assert noticed.startswith(caught)


def test_nothing_to_catch(monkeypatch: pytest.MonkeyPatch) -> None:
    devices.cutlass_or_skip()
    with devices.emulated_ops(STANDARD[0]):
        CHOSEN.use(monkeypatch)
    assert outcome() == "nothing"
