"""Mutations of the kernel of ``indexer_topk``, each reported or seen in the keys."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest
import torch

from nvfp4_kernels import compile as kernel_compile
from nvfp4_kernels import indexer_topk
from tests import devices
from tests.emulator import EAGER, EmulatorError, randomised
from tests.emulator.findings import MissingDependencyWait
from tests.test_kernels.indexer.topk_cases import COLUMNS, PAIR, ROWS, check, ints, rows_of, use

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Mistake:
    """Mutation, and what catches it: a finding's class, or "wrong keys"."""

    patch: Patch
    caught: str


def module(name: str) -> Any:
    return import_module(f"nvfp4_kernels.indexer.topk.{name}")


def without(name: str, caller: str) -> Patch:
    """Patch that leaves out a primitive where ``caller`` uses it."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        from cutlass.experimental import primitives as ptx

        given = getattr(ptx, name)

        def maybe(*args: Any, **kwargs: Any) -> Any:
            return None if _caller() == caller else given(*args, **kwargs)

        patch.setattr(ptx, name, maybe)

    return apply


def _caller() -> str:
    """Nearest function of the kernel's modules; bodies of its loops are functions as well."""
    frame: Any = sys._getframe(2)
    while True:
        name, owner = frame.f_code.co_name, frame.f_globals.get("__name__", "")
        if owner.startswith("nvfp4_kernels.indexer.topk") and (
            name in frame.f_globals or name == "kernel"
        ):
            return name
        frame = frame.f_back


def replaced(owner: str, name: str, make: Callable[[Any], Any]) -> Patch:
    """Patch that replaces a module's function by what ``make`` returns for it."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(module(owner), name, make(getattr(module(owner), name)))

    return apply


def last_of_equal_ones(patch: pytest.MonkeyPatch) -> None:
    """Make the keys' lower half grow with the column."""
    from cutlass import Uint32, Uint64

    def key_of(value: Any, column: Any) -> Any:
        return (Uint64(module("keys").order_bits(value)) << 32) | Uint64(column.bitcast(Uint32))

    patch.setattr(module("stream"), "key_of", key_of)
    patch.setattr(module("result"), "column_of", lambda key: Uint32(key))


def by_bits(value: Any) -> Any:
    """Order the two zeros as well."""
    from cutlass import Int32, Uint32

    bits = value.bitcast(Int32)
    return (bits ^ ((bits >> 31) | Int32(-(1 << 31)))).bitcast(Uint32)


def one_less(given: Any) -> Any:
    return lambda *args: given(*args) - 1


def rank_before(given: Any) -> Any:
    return lambda group, entries, low, high, need, *rest: given(
        group, entries, low, high, need - 1, *rest
    )


MISTAKES = {
    "the last of equal ones": Mistake(last_of_equal_ones, "wrong keys"),
    "only what exceeds the threshold": Mistake(
        replaced("stream", "value_before", lambda given: module("keys").value_of), "wrong keys"
    ),
    "-0 less than +0": Mistake(replaced("keys", "order_bits", lambda given: by_bits), "wrong keys"),
    "one key too few": Mistake(replaced("kernel", "rank_ties", rank_before), ""),
    "counts of this CTA alone": Mistake(
        replaced(
            "select", "_cluster_count", lambda given: lambda group, at, _: given(group, at, 1)
        ),
        "",
    ),
    "nothing before a slice": Mistake(
        replaced("result", "_before_slice", lambda given: lambda *_: 0), "DataRace"
    ),
    "elements of a batch one off": Mistake(replaced("stream", "_offset", one_less), ""),
    "no barrier before the histogram": Mistake(
        without("barrier_cta_sync", "histogram_pass"), "DataRace"
    ),
    "no barrier before totals are read": Mistake(
        without("barrier_cta_sync", "group_exclusive_sum"), "UninitialisedRead"
    ),
    "no barrier around reading": Mistake(without("barrier_cta_sync", "stream"), "DataRace"),
    "no barrier before keys are overwritten": Mistake(
        without("barrier_cta_sync", "keep_best"), "DataRace"
    ),
    "no barrier before the threshold": Mistake(
        without("barrier_cta_sync", "rank_ties"), "UninitialisedRead"
    ),
    "no barrier before places": Mistake(without("barrier_cta_sync", "write"), "DataRace"),
    "no barrier in the sample": Mistake(without("barrier_cta_sync", "_range"), "UninitialisedRead"),
    "no wait for peers": Mistake(without("barrier_cluster_wait", "sync_cluster"), "DataRace"),
    "peers are not told": Mistake(
        without("barrier_cluster_arrive", "sync_cluster"), "BarrierMisuse"
    ),
}


@contextmanager
def compiled_anew() -> Iterator[None]:
    kernel_compile.compiled.cache_clear()
    try:
        yield
    finally:
        kernel_compile.compiled.cache_clear()


def outcome() -> str:
    """First finding in a sampled row, one of ties and one of zeros."""
    for schedule in (EAGER, randomised(1)):
        with devices.emulated_ops(schedule):
            try:
                for name, top_k in (("normal", 100), ("few values", 1000), ("both zeros", 1000)):
                    check(rows_of(ROWS[name], 1), ints(COLUMNS), top_k, torch.device("cpu"))
            except EmulatorError as finding:
                return type(finding).__name__
            except AssertionError:
                return "wrong keys"
    return "nothing"


@pytest.mark.parametrize("name", MISTAKES)
def test_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    devices.cutlass_or_skip()
    with devices.emulated_ops(EAGER):
        use(monkeypatch, PAIR)
        MISTAKES[name].patch(monkeypatch)
    with compiled_anew():
        noticed = outcome()
    print(f"{name}: {noticed}")
    assert noticed != "nothing"
    assert noticed.startswith(MISTAKES[name].caught)


def test_nothing_to_catch(monkeypatch: pytest.MonkeyPatch) -> None:
    devices.cutlass_or_skip()
    with devices.emulated_ops(EAGER):
        use(monkeypatch, PAIR)
    assert outcome() == "nothing"


def test_a_kernel_waits_for_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    devices.cutlass_or_skip()
    with devices.emulated_ops(EAGER), compiled_anew():
        use(monkeypatch, PAIR)
        logits = rows_of(ROWS["normal"], 1)
        _, valid = indexer_topk(logits, ints(COLUMNS), 100)
        without("griddepcontrol", "kernel")(monkeypatch)
        kernel_compile.compiled.cache_clear()
        with pytest.raises(MissingDependencyWait, match=r"griddepcontrol\.wait before the read"):
            indexer_topk(logits, valid, 50)
