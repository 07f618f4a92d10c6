"""Mutants of scoring fused with top-k: each mutant is reported, or its keys are wrong."""

import sys
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch

from nvfp4_kernels.indexer.sm100.tile import ScoreTile
from tests.emulator import EAGER, randomised
from tests.mutants import ANYTHING, WRONG, Mutant, Patch
from tests.mutants.kernels import (
    NO_DEPENDENCY_WAIT,
    Room,
    check_caught,
    check_nothing_to_catch,
    nothing,
)
from tests.test_kernels.indexer import topk_cases
from tests.test_kernels.indexer.best_keys_cases import HEAD_DIM, chosen, run_paged, scored, use
from tests.test_kernels.indexer.indexer_cases import Case

KERNEL = Room("nvfp4_kernels.indexer")
SCHEDULES = EAGER, randomised(1)

TOP_K = 100
WHOLE = chosen(ScoreTile("bf16", HEAD_DIM, 2, group_queries=2, groups=2), 640, words=128)
PINGPONG = chosen(ScoreTile("bf16", HEAD_DIM, 2, pingpong=2), 640)
SPLIT = chosen(ScoreTile("bf16", HEAD_DIM, 2, pingpong=2), 640, splits=3)
LONG = chosen(ScoreTile("bf16", HEAD_DIM, 2), 640, words=128)
CHOICES = {"whole": WHOLE, "pingpong": PINGPONG, "split": SPLIT, "long": LONG}


SYNCHRONISING = {
    "begin", "end", "_make_room", "_write_in_order", "keep_best", "histogram_pass", "rank_ties",
    "group_exclusive_sum",
}  # fmt: skip
VISITOR = "sm100.best_keys.visitor"
TOPK_VISITOR = f"{VISITOR}:TopkVisitor"
STATE = "sm100.best_keys.candidates:TopkState"
RESULT = "sm100.best_keys.result"


def last_of_equal_ones(patch: pytest.MonkeyPatch) -> None:
    """Mutant: take the last of equal scores, by sort keys that grow with the column."""
    from cutlass import Uint32, Uint64

    keys = import_module("nvfp4_kernels.indexer.topk.keys")

    def key_of(value: Any, column: Any) -> Any:
        return (Uint64(keys.order_bits(value)) << 32) | Uint64(column.bitcast(Uint32))

    KERNEL.replaced(VISITOR, "key_of", key_of)(patch)
    KERNEL.replaced(RESULT, "column_of", lambda key: Uint32(key))(patch)


def alone(patch: pytest.MonkeyPatch) -> None:
    """Mutant: let each thread decide alone, without the CTA-wide reduction."""
    from cutlass.experimental import primitives as ptx

    patch.setattr(ptx, "barrier_cta_red", lambda full, *rest, **more: full)


def one_key_later(patch: pytest.MonkeyPatch) -> None:
    """Mutant: raise the threshold past keys of equal score that differ in their column only."""
    from cutlass import Uint64

    def make(given: Any) -> Any:
        def keep_best(group: Any, *rest: Any) -> None:
            group.shared.threshold.store(given(group, *rest) + (Uint64(1) << 32))

        return keep_best

    KERNEL.swapped(VISITOR, "keep_best", make)(patch)


def without_sync(method: str) -> Patch:
    """Mutant: leave out the barriers in a method of ``TopkVisitor`` or in a function."""

    def make(given: Any) -> Any:
        def sync(group: Any) -> None:
            if _caller() != method:
                given(group)

        return sync

    return KERNEL.swapped("topk.shared:ThreadGroup", "sync", make)


def _caller() -> str:
    """Name of the nearest caller that synchronises; bodies of loops are functions as well."""
    frame: Any = sys._getframe(2)
    while frame.f_code.co_name not in SYNCHRONISING:
        frame = frame.f_back
    return frame.f_code.co_name


MUTANTS = {
    "the last of equal ones": Mutant(last_of_equal_ones, WRONG),
    "a threshold one too high": Mutant(one_key_later, ANYTHING),
    "one key too few is kept": Mutant(
        KERNEL.with_arguments(
            "topk.select", "rank_ties", lambda g, e, lo, hi, n, *r: (g, e, lo, hi, n - 1, *r)
        ),
        ANYTHING,
    ),
    "NaN as it comes": Mutant(
        KERNEL.replaced(VISITOR, "nan_to_lowest", lambda value: value), WRONG
    ),
    "buffers never checked": Mutant(
        KERNEL.replaced(TOPK_VISITOR, "begin_phase", nothing), ANYTHING
    ),
    "a check without waiting": Mutant(alone, ANYTHING),
    "buffers checked too rarely": Mutant(
        KERNEL.swapped(
            "sm100.best_keys.tile:Selection", "max_appended", lambda given: lambda *_: -512
        ),
        ANYTHING,
        "pingpong",
    ),
    "no waiting before appending": Mutant(without_sync("begin"), ANYTHING),
    "no waiting while counts are read": Mutant(without_sync("_make_room"), "DataRace"),
    "no waiting before the last choice": Mutant(without_sync("end"), "DataRace"),
    "no waiting for the bitmap": Mutant(without_sync("_write_in_order"), "DataRace"),
    "a neighbour's candidates": Mutant(
        KERNEL.with_arguments(STATE, "query", lambda number: (number * 0,)), ANYTHING
    ),
    "a neighbour's range": Mutant(
        KERNEL.with_arguments(TOPK_VISITOR, "_seen", lambda o, r, w, n: (o, r, w, n + 1)), WRONG
    ),
    "another group's memory": Mutant(
        KERNEL.with_arguments(
            VISITOR,
            "thread_group",
            lambda t, s, m, coord: (t, s, m, replace(coord, group=coord.group * 0)),
        ),
        ANYTHING,
    ),
    "threads of one ping-pong set counted for all": Mutant(
        KERNEL.with_result(
            VISITOR, "thread_group", lambda group: replace(group, thread=group.thread % 128)
        ),
        ANYTHING,
        "pingpong",
    ),
    "memory not cleared": Mutant(
        KERNEL.swapped(
            VISITOR,
            "thread_group",
            lambda given: lambda *args: replace(given(*args), thread=given(*args).thread + 5),
        ),
        "UninitialisedRead",
        "pingpong",
    ),
    "keys behind a context": Mutant(
        KERNEL.with_result(VISITOR, "key_range", lambda seen: replace(seen, end=seen.end + 1)),
        WRONG,
        "long",
    ),
    "a row of one key too many is not scored": Mutant(
        KERNEL.with_result(TOPK_VISITOR, "min_keys", lambda keys: keys + 1), ANYTHING, "split"
    ),
    "rows that need none are scored": Mutant(
        KERNEL.with_result(TOPK_VISITOR, "min_keys", lambda keys: keys - 1), "OutOfBounds", "nvfp4"
    ),
    "no offset of a split": Mutant(
        KERNEL.with_arguments(
            RESULT,
            "candidates_before",
            lambda scheduler, seen, split, *rest: (scheduler, seen, split * 0, *rest),
        ),
        ANYTHING,
        "split",
    ),
    "a split too few counted": Mutant(
        KERNEL.with_arguments(
            RESULT,
            "candidates_before",
            lambda scheduler, seen, split, *rest: (scheduler, seen, split - 1, *rest),
        ),
        ANYTHING,
        "split",
    ),
    "positions in the place of keys": Mutant(
        KERNEL.swapped(
            "topk.result:TopkResult",
            "store",
            lambda given: lambda result, *rest: given(replace(result, ids=None), *rest),
        ),
        WRONG,
        "split",
    ),
    "bitmaps run into one another": Mutant(
        KERNEL.with_result(RESULT, "group_exclusive_sum", lambda sums: (sums[0], sums[1] * 0)),
        ANYTHING,
        "long",
    ),
    "no dependency wait": Mutant(NO_DEPENDENCY_WAIT, "MissingDependencyWait", "split"),
}


def check(on: str) -> None:
    """Run rows with ties and NaN, ascending rows, rows around ``top_k`` keys, and long rows."""
    device = torch.device("cpu")
    if on == "nvfp4":
        # Pages of queries that see at most top_k keys are never looked up.
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


def patches(on: str) -> list[Patch]:
    return [partial(use, choice=CHOICES[on])] if on in CHOICES else []


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_caught(mutant: Mutant) -> None:
    on = mutant.on or "whole"
    check_caught(mutant, partial(check, on), *patches(on), schedules=SCHEDULES)


@pytest.mark.parametrize("on", [*CHOICES, "nvfp4"])
def test_nothing_to_catch(on: str) -> None:
    check_nothing_to_catch(partial(check, on), *patches(on), schedules=SCHEDULES)
