"""Mutations of the visitor that keeps the best keys, each reported or seen in the keys."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch

from nvfp4_kernels import compile as kernel_compile
from nvfp4_kernels.indexer.sm100.tile import ScoreTile
from tests import devices
from tests.emulator import EAGER, EmulatorError, randomised
from tests.test_kernels.gemm.test_mutations_sm100 import Patch, without
from tests.test_kernels.indexer import topk_cases
from tests.test_kernels.indexer.best_keys_cases import HEAD_DIM, chosen, run_paged, scored, use
from tests.test_kernels.indexer.indexer_cases import Case

TOP_K = 100
WHOLE = chosen(ScoreTile("bf16", HEAD_DIM, 2, group_queries=2, groups=2), 640, words=128)
PINGPONG = chosen(ScoreTile("bf16", HEAD_DIM, 2, pingpong=2), 640)
SPLIT = chosen(ScoreTile("bf16", HEAD_DIM, 2, pingpong=2), 640, splits=3)
LONG = chosen(ScoreTile("bf16", HEAD_DIM, 2), 640, words=128)
CHOICES = {"whole": WHOLE, "pingpong": PINGPONG, "split": SPLIT, "long": LONG}


@dataclass(frozen=True)
class Mistake:
    """Mutation, its choice, and what catches it: a finding's class, or "wrong keys"."""

    patch: Patch
    caught: str
    on: str = "whole"


def swapped(owner: str, name: str, make: Callable[[Any], Any]) -> Patch:
    """Patch that replaces a module's or class's ``name`` by what ``make`` returns for it."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        module, _, kind = owner.partition(":")
        found = import_module(f"nvfp4_kernels.{module}")
        found = getattr(found, kind) if kind else found
        patch.setattr(found, name, make(getattr(found, name)))

    return apply


def replaced(owner: str, name: str, value: Any) -> Patch:
    return swapped(owner, name, lambda given: value)


def with_arguments(owner: str, name: str, change: Callable[..., tuple[Any, ...]]) -> Patch:
    return swapped(owner, name, lambda given: lambda *args: given(*change(*args)))


def with_result(owner: str, name: str, change: Callable[[Any], Any]) -> Patch:
    return swapped(owner, name, lambda given: lambda *args: change(given(*args)))


def nothing(*arguments: Any) -> None:
    """Do nothing instead."""


SYNCHRONISING = {
    "begin", "end", "_make_room", "_write_in_order", "keep_best", "histogram_pass", "rank_ties",
    "group_exclusive_sum",
}  # fmt: skip
VISITOR = "indexer.sm100.best_keys.visitor"
TOPK_VISITOR = f"{VISITOR}:TopkVisitor"
STATE = "indexer.sm100.best_keys.candidates:TopkState"
RESULT = "indexer.sm100.best_keys.result"


def last_of_equal_ones(patch: pytest.MonkeyPatch) -> None:
    """Make the keys' lower half grow with the column."""
    from cutlass import Uint32, Uint64

    keys = import_module("nvfp4_kernels.indexer.topk.keys")

    def key_of(value: Any, column: Any) -> Any:
        return (Uint64(keys.order_bits(value)) << 32) | Uint64(column.bitcast(Uint32))

    replaced(VISITOR, "key_of", key_of)(patch)
    replaced(RESULT, "column_of", lambda key: Uint32(key))(patch)


def alone(patch: pytest.MonkeyPatch) -> None:
    """Let each thread decide by what it knows itself."""
    from cutlass.experimental import primitives as ptx

    patch.setattr(ptx, "barrier_cta_red", lambda full, *rest, **more: full)


def one_key_later(patch: pytest.MonkeyPatch) -> None:
    """Raise thresholds beyond equal scores that exceed them by their column alone."""
    from cutlass import Uint64

    def make(given: Any) -> Any:
        def keep_best(group: Any, *rest: Any) -> None:
            group.shared.threshold.store(given(group, *rest) + (Uint64(1) << 32))

        return keep_best

    swapped(VISITOR, "keep_best", make)(patch)


def without_sync(method: str) -> Patch:
    """Leave out the barriers of a method of ``TopkVisitor`` itself, or of a function."""

    def make(given: Any) -> Any:
        def sync(group: Any) -> None:
            if _caller() != method:
                given(group)

        return sync

    return swapped("indexer.topk.shared:ThreadGroup", "sync", make)


def _caller() -> str:
    """Nearest function that synchronises; bodies of its loops are functions as well."""
    frame: Any = sys._getframe(2)
    while frame.f_code.co_name not in SYNCHRONISING:
        frame = frame.f_back
    return frame.f_code.co_name


MISTAKES = {
    "the last of equal ones": Mistake(last_of_equal_ones, "wrong keys"),
    "a threshold one too high": Mistake(one_key_later, ""),
    "one key too few is kept": Mistake(
        with_arguments(
            "indexer.topk.select",
            "rank_ties",
            lambda g, e, lo, hi, n, *r: (g, e, lo, hi, n - 1, *r),
        ),
        "",
    ),
    "NaN as it comes": Mistake(
        replaced(VISITOR, "nan_to_lowest", lambda value: value), "wrong keys"
    ),
    "buffers never checked": Mistake(replaced(TOPK_VISITOR, "begin_phase", nothing), ""),
    "a check without waiting": Mistake(alone, ""),
    "buffers checked too rarely": Mistake(
        swapped(
            "indexer.sm100.best_keys.tile:Selection", "max_appended", lambda given: lambda *_: -512
        ),
        "",
        "pingpong",
    ),
    "no waiting before appending": Mistake(without_sync("begin"), ""),
    "no waiting while counts are read": Mistake(without_sync("_make_room"), "DataRace"),
    "no waiting before the last choice": Mistake(without_sync("end"), "DataRace"),
    "no waiting for the bitmap": Mistake(without_sync("_write_in_order"), "DataRace"),
    "a neighbour's candidates": Mistake(
        with_arguments(STATE, "query", lambda self, number: (self, number * 0)), ""
    ),
    "a neighbour's range": Mistake(
        with_arguments(TOPK_VISITOR, "_seen", lambda s, o, r, w, n: (s, o, r, w, n + 1)),
        "wrong keys",
    ),
    "another group's memory": Mistake(
        with_arguments(
            VISITOR,
            "thread_group",
            lambda t, s, m, coord: (t, s, m, replace(coord, group=coord.group * 0)),
        ),
        "",
    ),
    "threads of one ping-pong set counted for all": Mistake(
        with_result(
            VISITOR, "thread_group", lambda group: replace(group, thread=group.thread % 128)
        ),
        "",
        "pingpong",
    ),
    "memory not cleared": Mistake(
        swapped(
            VISITOR,
            "thread_group",
            lambda given: lambda *args: replace(given(*args), thread=given(*args).thread + 5),
        ),
        "UninitialisedRead",
        "pingpong",
    ),
    "keys behind a context": Mistake(
        with_result(VISITOR, "key_range", lambda seen: replace(seen, end=seen.end + 1)),
        "wrong keys",
        "long",
    ),
    "a row of one key too many is not scored": Mistake(
        with_result(TOPK_VISITOR, "min_keys", lambda keys: keys + 1), "", "split"
    ),
    "rows that need none are scored": Mistake(
        with_result(TOPK_VISITOR, "min_keys", lambda keys: keys - 1), "OutOfBounds", "nvfp4"
    ),
    "no offset of a split": Mistake(
        swapped(
            RESULT,
            "candidates_before",
            lambda given: (
                lambda scheduler, seen, split, *rest: given(scheduler, seen, split * 0, *rest)
            ),
        ),
        "",
        "split",
    ),
    "a split too few counted": Mistake(
        swapped(
            RESULT,
            "candidates_before",
            lambda given: (
                lambda scheduler, seen, split, *rest: given(scheduler, seen, split - 1, *rest)
            ),
        ),
        "",
        "split",
    ),
    "positions in the place of keys": Mistake(
        with_arguments(
            "indexer.topk.result:TopkResult", "store", lambda r, c, p: (replace(r, ids=None), c, p)
        ),
        "wrong keys",
        "split",
    ),
    "bitmaps run into one another": Mistake(
        with_result(RESULT, "group_exclusive_sum", lambda sums: (sums[0], sums[1] * 0)), "", "long"
    ),
    "no dependency wait": Mistake(
        without("griddepcontrol", lambda action: str(action) == "wait"),
        "MissingDependencyWait",
        "split",
    ),
}


def outcome(on: str) -> str:
    """First finding over two schedules."""
    for schedule in (EAGER, randomised(1)):
        with devices.emulated_ops(schedule) as gpu:
            try:
                _run(on, gpu)
            except EmulatorError as finding:
                return type(finding).__name__
            except AssertionError:
                return "wrong keys"
    return "nothing"


def _run(on: str, gpu: Any) -> None:
    """Run ties, NaN, ascending rows, ``top_k`` + 1 keys, fewer, and rows of two bitmaps."""
    device = torch.device("cpu")
    if on == "nvfp4":
        # Nobody looks for the pages of queries that see no more than are wanted.
        problem = Case(((80, 100),), heads=8, next_n=2, block_size=64, top_k=100).problem("nvfp4")
        run_paged(problem, device, block_table=problem.paged()["block_table"] * 0 + (1 << 30))
        return
    rng = np.random.default_rng(5)
    ties = topk_cases.some(rng, topk_cases.normal(rng, 1300).round(1), float("nan"))
    other = {
        "whole": topk_cases.normal(rng, 300),
        "pingpong": np.arange(2600, dtype=np.float32),
        "split": topk_cases.normal(rng, 101),
        "long": topk_cases.normal(rng, 4700),
    }
    rows = [ties[: len(ties) if on != "long" else 50], other[on]]
    run_paged(scored(rows, TOP_K, next_n=3 if on == "whole" else 1), device)


@pytest.mark.parametrize("name", MISTAKES)
def test_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    devices.cutlass_or_skip()
    mistake = MISTAKES[name]
    with devices.emulated_ops(EAGER):
        mistake.patch(monkeypatch)
        if mistake.on in CHOICES:
            use(monkeypatch, CHOICES[mistake.on])
    kernel_compile.compiled.cache_clear()
    try:
        noticed = outcome(mistake.on)
    finally:
        kernel_compile.compiled.cache_clear()
    print(f"{name}: {noticed}")
    assert noticed != "nothing"
    assert noticed.startswith(mistake.caught)


@pytest.mark.parametrize("on", [*CHOICES, "nvfp4"])
def test_nothing_to_catch(on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    devices.cutlass_or_skip()
    with devices.emulated_ops(EAGER):
        if on in CHOICES:
            use(monkeypatch, CHOICES[on])
    assert outcome(on) == "nothing"
