"""Mutants of ``indexer_topk``'s kernel: each mutant is reported, or its keys are wrong."""

import sys
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch

from nvfp4_kernels import indexer_topk
from tests.emulator import EAGER, randomised
from tests.mutants import ANYTHING, WRONG, Mutant, Patch
from tests.mutants.kernels import (
    Room,
    check_caught,
    check_dependency_wait,
    check_nothing_to_catch,
    without,
)
from tests.test_kernels.indexer.topk_cases import COLUMNS, PAIR, ROWS, check, ints, rows_of, use

KERNEL = Room("nvfp4_kernels.indexer.topk")
SCHEDULES = EAGER, randomised(1)
USE_PAIR = partial(use, tile=PAIR)


def without_in(name: str, caller: str) -> Patch:
    """Mutant: leave out a primitive where ``caller`` uses it."""
    return without(name, lambda *args, **kwargs: _caller() == caller)


def _caller() -> str:
    """Name of the nearest function of the kernel; bodies of loops are functions as well."""
    frame: Any = sys._getframe(2)
    while True:
        name, owner = frame.f_code.co_name, frame.f_globals.get("__name__", ANYTHING)
        if owner.startswith("nvfp4_kernels.indexer.topk") and (
            name in frame.f_globals or name == "kernel"
        ):
            return name
        frame = frame.f_back


def module(name: str) -> Any:
    return import_module(f"nvfp4_kernels.indexer.topk.{name}")


def last_of_equal_ones(patch: pytest.MonkeyPatch) -> None:
    """Mutant: take the last of equal values, by sort keys that grow with the column."""
    from cutlass import Uint32, Uint64

    def key_of(value: Any, column: Any) -> Any:
        return (Uint64(module("keys").order_bits(value)) << 32) | Uint64(column.bitcast(Uint32))

    patch.setattr(module("stream"), "key_of", key_of)
    patch.setattr(module("result"), "column_of", lambda key: Uint32(key))


def by_bits(value: Any) -> Any:
    """Mutant: order negative zero below zero."""
    from cutlass import Int32, Uint32

    bits = value.bitcast(Int32)
    return (bits ^ ((bits >> 31) | Int32(-(1 << 31)))).bitcast(Uint32)


def one_less(given: Any) -> Any:
    return lambda *args: given(*args) - 1


def rank_before(given: Any) -> Any:
    return lambda group, entries, low, high, need, *rest: given(
        group, entries, low, high, need - 1, *rest
    )


MUTANTS = {
    "the last of equal ones": Mutant(last_of_equal_ones, WRONG),
    "only what exceeds the threshold": Mutant(
        KERNEL.swapped("stream", "value_before", lambda given: module("keys").value_of), WRONG
    ),
    "-0 less than +0": Mutant(KERNEL.swapped("keys", "order_bits", lambda given: by_bits), WRONG),
    "one key too few": Mutant(KERNEL.swapped("kernel", "rank_ties", rank_before), ANYTHING),
    "counts of this CTA alone": Mutant(
        KERNEL.swapped(
            "select", "_cluster_count", lambda given: lambda group, at, _: given(group, at, 1)
        ),
        ANYTHING,
    ),
    "room for a bin too few": Mutant(
        KERNEL.swapped("shared", "BINS", lambda bins: bins - 1), "ArrayOverrun"
    ),
    "nothing before a slice": Mutant(
        KERNEL.swapped("result", "_before_slice", lambda given: lambda *_: 0), "DataRace"
    ),
    "elements of a batch one off": Mutant(KERNEL.swapped("stream", "_offset", one_less), ANYTHING),
    "no barrier before the histogram": Mutant(
        without_in("barrier_cta_sync", "histogram_pass"), "DataRace"
    ),
    "no barrier before totals are read": Mutant(
        without_in("barrier_cta_sync", "group_exclusive_sum"), "UninitialisedRead"
    ),
    "no barrier around reading": Mutant(without_in("barrier_cta_sync", "stream"), "DataRace"),
    "no barrier before keys are overwritten": Mutant(
        without_in("barrier_cta_sync", "keep_best"), "DataRace"
    ),
    "no barrier before the threshold": Mutant(
        without_in("barrier_cta_sync", "rank_ties"), "UninitialisedRead"
    ),
    "no barrier before places": Mutant(without_in("barrier_cta_sync", "write"), "DataRace"),
    "no barrier in the sample": Mutant(
        without_in("barrier_cta_sync", "_range"), "UninitialisedRead"
    ),
    "no wait for peers": Mutant(
        without_in("barrier_cluster_wait", "sync_cluster"), "UnstartedPeer"
    ),
    "peers are not told": Mutant(
        without_in("barrier_cluster_arrive", "sync_cluster"), "BarrierMisuse"
    ),
}


def check_rows() -> None:
    """Check a sampled row, a row of ties and a row of zeros."""
    for name, top_k in (("normal", 100), ("few values", 1000), ("both zeros", 1000)):
        check(rows_of(ROWS[name], 1), ints(COLUMNS), top_k, torch.device("cpu"))


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_caught(mutant: Mutant) -> None:
    check_caught(mutant, check_rows, USE_PAIR, schedules=SCHEDULES)


def test_nothing_to_catch() -> None:
    check_nothing_to_catch(check_rows, USE_PAIR, schedules=SCHEDULES)


def twice() -> None:
    """Launch twice: the second launch's lengths are the first one's results."""
    logits = rows_of(ROWS["normal"], 1)
    _, valid = indexer_topk(logits, ints(COLUMNS), 100)
    indexer_topk(logits, valid, 50)


def test_a_kernel_waits_for_the_one_before() -> None:
    check_dependency_wait(twice, USE_PAIR)
