"""Mistakes made on purpose in the attention kernel, each reported or seen in the numbers."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest

from nvfp4_kernels import attention, paged_attention
from nvfp4_kernels import compile as kernel_compile
from nvfp4_kernels.attention.sm100.tile import AttentionTile
from tests import devices
from tests.emulator import STANDARD, EmulatorError
from tests.emulator.findings import MissingDependencyWait
from tests.test_kernels.attention.attention_cases import Case
from tests.test_kernels.attention.attention_sm100 import Chosen, check
from tests.test_kernels.gemm.test_mutations_sm100 import Patch, changed, without

# The ring goes round more than once; O is rescaled; the last page has room, filled with NaN.
TWO_TILES = Chosen(AttentionTile(64, 2, max_stages=3))
P_IN_S = Chosen(AttentionTile(128, 2))  # P in the columns of S
QK_FIRST = Chosen(AttentionTile(64, 1, max_stages=3))  # two stages of S
WARP_SPLIT = Chosen(AttentionTile(64, warp_split_kv=True))
CASE = {"queries": (150,), "keys": (389,), "query_heads": 2, "heads": 1, "scale": 4.0}


@dataclass(frozen=True)
class Mistake:
    """What is changed, on which tile, and what says so: a finding's class, or "wrong numbers"."""

    patch: Patch
    caught: str
    on: Chosen = TWO_TILES


def replaced(owner: str, name: str, value: Any) -> Patch:
    """Another function, or number, in the place of one of a module or class."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        module, _, kind = owner.partition(".")
        found = import_module(f"nvfp4_kernels.attention.sm100.{module}")
        patch.setattr(getattr(found, kind) if kind else found, name, value)

    return apply


def with_result(owner: str, name: str, change: Callable[[Any], Any]) -> Patch:
    """Changes what a method returns."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        module, _, kind = owner.partition(".")
        found = getattr(import_module(f"nvfp4_kernels.attention.sm100.{module}"), kind)
        given = getattr(found, name)
        patch.setattr(found, name, lambda self, *args: change(given(self, *args)))

    return apply


def with_arguments(owner: str, name: str, change: Callable[..., tuple[Any, ...]]) -> Patch:
    """Changes what a method is given."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        module, _, kind = owner.partition(".")
        found = getattr(import_module(f"nvfp4_kernels.attention.sm100.{module}"), kind)
        given = getattr(found, name)
        patch.setattr(found, name, lambda self, *args: given(self, *change(*args)))

    return apply


def nothing(*arguments: Any) -> None:
    """Does what a mistaken kernel does instead."""


def waits_for(what: str) -> Callable[..., bool]:
    return lambda kind: str(kind) == what


MISTAKES = {
    "PV does not wait for P": Mistake(replaced("mma", "wait_p_full", nothing), "DataRace", P_IN_S),
    "O rescaled while PV adds to it": Mistake(
        replaced("softmax", "wait_o_full", nothing), "UninitialisedRead", QK_FIRST
    ),
    "O read before the last PV": Mistake(replaced("epilogue", "wait_o_full", nothing), "DataRace"),
    "O not rescaled": Mistake(replaced("softmax.Softmax", "_rescale", nothing), "wrong numbers"),
    "O accumulated from the start": Mistake(
        with_arguments("mma.Mma", "_pv_mmas", lambda *a: (*a[:-1], True)),
        "UninitialisedRead",
    ),
    "divided by the sum twice": Mistake(
        with_result("epilogue.Epilogue", "_normalise", lambda r: (r[0], r[1] * r[1])),
        "wrong numbers",
    ),
    "one warp need not arrive": Mistake(replaced("barriers", "SOFTMAX_ARRIVALS", 3), ""),
    "one warp too many": Mistake(replaced("barriers", "SOFTMAX_ARRIVALS", 5), "Deadlock"),
    "no wait for tcgen05.ld": Mistake(without("tcgen05_wait", waits_for("load")), "UnwaitedLoad"),
    "no wait for tcgen05.st": Mistake(without("tcgen05_wait", waits_for("store")), "DataRace"),
    "no tcgen05 fence": Mistake(without("tcgen05_fence"), "MissingTensorFence"),
    "no proxy fence after Q and zeros": Mistake(without("fence_proxy"), "MissingProxyFence"),
    "no warp barrier": Mistake(without("bar_warp_sync"), "DataRace"),
    "the ring is not waited for": Mistake(replaced("loader", "wait", nothing), "DataRace"),
    "bytes expected twice": Mistake(
        changed("mbarrier_arrive_expect_tx", lambda barrier, n: (barrier, 2 * n)), "Deadlock"
    ),
    "what follows the last value is left": Mistake(
        replaced("loader.TmaLoader", "_zero_tail", nothing), "wrong numbers"
    ),
    "a key too many is seen": Mistake(
        with_arguments("softmax.Softmax", "_mask", lambda scores, b, e: (scores, b, e + 1)),
        "wrong numbers",
    ),
    "nothing is masked": Mistake(
        with_arguments("softmax.Softmax", "_mask", lambda scores, b, e: (scores, b, e + 999)),
        "wrong numbers",
    ),
    "warp split: other warps' columns of P are left": Mistake(
        replaced("softmax", "WARPS", 1), "wrong numbers", WARP_SPLIT
    ),
    "warp split: every part counts in full": Mistake(
        with_result(
            "epilogue_warp_split.WarpSplitEpilogue", "_combine", lambda r: (r[0], r[1] * 0 + 1)
        ),
        "wrong numbers",
        WARP_SPLIT,
    ),
    "warp split: one part's sum": Mistake(
        with_result(
            "epilogue_warp_split.WarpSplitEpilogue", "_sum_warps", lambda r: [x * 0.25 for x in r]
        ),
        "wrong numbers",
        WARP_SPLIT,
    ),
    "warp split: warps do not sync": Mistake(
        replaced("epilogue_warp_split.WarpSplitEpilogue", "_sync", nothing), "", WARP_SPLIT
    ),
    "warp split: too few threads sync": Mistake(
        replaced("epilogue_warp_split", "THREADS", 96), "", WARP_SPLIT
    ),
    "tensor memory kept": Mistake(without("tcgen05_dealloc"), "TensorMemory"),
}


def outcome(chosen: Chosen) -> str:
    """The first thing that is noticed, over all schedules."""
    problem = Case(**CASE, head_dim=chosen.tile.head_dim).problem()
    for schedule in STANDARD:
        with devices.emulated_ops(schedule):
            try:
                check(paged_attention(**problem.paged()), problem)
            except EmulatorError as finding:
                return type(finding).__name__
            except AssertionError:
                return "wrong numbers"
    return "nothing"


@pytest.mark.parametrize("name", MISTAKES)
def test_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    devices.cutlass_or_skip()
    mistake = MISTAKES[name]
    with devices.emulated_ops(STANDARD[0]):
        mistake.patch(monkeypatch)
        mistake.on.use(monkeypatch)
    kernel_compile.compiled.cache_clear()
    try:
        noticed = outcome(mistake.on)
    finally:
        kernel_compile.compiled.cache_clear()
    print(f"{name}: {noticed}")
    assert noticed != "nothing"
    assert noticed.startswith(mistake.caught)


@pytest.mark.parametrize(
    "chosen",
    [TWO_TILES, P_IN_S, QK_FIRST, WARP_SPLIT],
    ids=["two tiles", "P in S", "QK first", "warp split"],
)
def test_nothing_to_catch(chosen: Chosen, monkeypatch: pytest.MonkeyPatch) -> None:
    devices.cutlass_or_skip()
    with devices.emulated_ops(STANDARD[0]):
        chosen.use(monkeypatch)
    assert outcome(chosen) == "nothing"


def test_the_kernel_waits_for_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    devices.cutlass_or_skip()

    def twice() -> None:
        """The second launch's queries are the first one's result."""
        arguments = Case((20,), (20,), 1, 1, causal=False).problem().dense()
        out, _ = attention(**arguments)
        attention(**arguments | {"q": out})

    with devices.emulated_ops(STANDARD[0]):
        twice()
        without("griddepcontrol", lambda action: str(action) == "wait")(monkeypatch)
        kernel_compile.compiled.cache_clear()
        with pytest.raises(MissingDependencyWait, match=r"griddepcontrol\.wait before the read"):
            twice()
    kernel_compile.compiled.cache_clear()
