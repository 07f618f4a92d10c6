"""Mutations of the scoring kernel, each reported or seen in the numbers."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch

from nvfp4_kernels import compile as kernel_compile
from nvfp4_kernels import indexer_logits
from nvfp4_kernels.indexer.sm100.tile import ScoreTile
from tests import devices
from tests.emulator import STANDARD, EmulatorError
from tests.emulator.findings import MissingDependencyWait
from tests.test_kernels.gemm.test_mutations_sm100 import Patch, changed, without
from tests.test_kernels.indexer.indexer_cases import Case, Problem
from tests.test_kernels.indexer.indexer_sm100 import Chosen, run_paged

# Rings and accumulators go round more than once; two words of scales, two groups of rows.
NVFP4 = Chosen(ScoreTile("nvfp4", 128, 20, 1, 2, doubled=5, max_stages=3))
FP8 = Chosen(ScoreTile("fp8", 64, 8, 2, 1, pingpong=2, max_stages=3))
# One sequence has key tiles that the other lacks.
CASE = {"lens": ((650, 649), (100, 70)), "next_n": 2, "block_size": 64}
NAN_KEY = 5


@dataclass(frozen=True)
class Mistake:
    """Mutation, its tile, and what catches it: a finding's class, or "wrong numbers"."""

    patch: Patch
    caught: str
    on: Chosen = NVFP4


def swapped(owner: str, name: str, make: Callable[[Any], Any]) -> Patch:
    """Patch that replaces a module's or class's ``name`` by what ``make`` returns for it."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        module, _, kind = owner.partition(".")
        found = import_module(f"nvfp4_kernels.indexer.sm100.{module}")
        found = getattr(found, kind) if kind else found
        patch.setattr(found, name, make(getattr(found, name)))

    return apply


def replaced(owner: str, name: str, value: Any) -> Patch:
    return swapped(owner, name, lambda given: value)


def with_result(owner: str, name: str, change: Callable[[Any], Any]) -> Patch:
    return swapped(owner, name, lambda given: lambda *args: change(given(*args)))


def with_arguments(owner: str, name: str, change: Callable[..., tuple[Any, ...]]) -> Patch:
    """Patch that changes the arguments of a method."""
    return swapped(owner, name, lambda given: lambda self, *args: given(self, *change(*args)))


def nothing(*arguments: Any) -> None:
    """Do nothing instead."""


def codes_as_integers(patch: pytest.MonkeyPatch) -> None:
    """Decode E2M1 as an integer."""
    from tests.emulator.tcgen05 import formats

    codes = np.arange(256, dtype=np.uint8)
    values = np.stack([codes & 15, codes >> 4], -1).astype(np.float32)
    values = np.where(values < 8, values, 8 - values).astype(np.float32)
    patch.setattr(formats, "_E2M1_PAIRS", np.ascontiguousarray(values).view(np.float64)[:, 0])


def query_nibbles_swapped(patch: pytest.MonkeyPatch) -> None:
    op = import_module("nvfp4_kernels.indexer.sm100.launch_logits")
    given = op.launch

    def launch(kernel: Any, arguments: Any) -> None:
        q = arguments.inputs.q
        given(kernel, arguments._replace(inputs=arguments.inputs._replace(q=q >> 4 | q << 4)))

    patch.setattr(op, "launch", launch)


def copies_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    from cutlass import cute

    patch.setattr(cute.arch, "cp_async_wait_group", nothing)


def no_relu(self: Any, values: list[Any], doubled: bool) -> tuple[Any, ...]:
    return tuple(value * (2.0 if doubled else 1.0) for value in values)


def load(kind: Any, *rest: Any, **kwargs: Any) -> bool:
    return str(kind) == "load"


MISTAKES = {
    "E2M1 read as an integer": Mistake(codes_as_integers, "wrong numbers"),
    "queries' nibbles swapped": Mistake(query_nibbles_swapped, "wrong numbers"),
    "scales of the neighbouring blocks": Mistake(
        replaced("mma", "MMA_SCALES", {"nvfp4": 0}), "wrong numbers"
    ),
    "scales of queries in the wrong row group": Mistake(
        with_arguments("scales.ScaleLoader", "_store", lambda a, words, n: (a, words[::-1], n)),
        "wrong numbers",
    ),
    "scales of the key tile before": Mistake(
        with_arguments("scales.ScaleLoader", "_copy", lambda a, p, s, i, *r: (a, p, s, i - 1, *r)),
        "",
    ),
    "signs of scales left": Mistake(
        replaced("scales", "UNSIGNED", 0xFFFFFFFF), "IllegalInstruction"
    ),
    "no relu": Mistake(replaced("epilogue.Epilogue", "_relu", no_relu), "wrong numbers"),
    "doubled, but weights not halved": Mistake(
        replaced("weights.WeightLoader", "_halved", lambda self, head, weight: weight),
        "wrong numbers",
    ),
    "weight of the neighbouring head": Mistake(
        with_result("weights.WeightLoader", "_row", lambda row: row[1:] + row[:1]),
        "wrong numbers",
    ),
    "weights of another query": Mistake(
        with_arguments("weights.WeightLoader", "run", lambda w, s, first: (w, s, first + 1)),
        "wrong numbers",
    ),
    "factor of another key": Mistake(
        with_arguments(
            "epilogue.Epilogue",
            "_factor",
            lambda f, b, i, coord, leader: (f, b, i, replace(coord, warp=coord.warp ^ 1), leader),
        ),
        "wrong numbers",
        FP8,
    ),
    "a key too many is seen": Mistake(
        with_result("logits", "key_range", lambda seen: replace(seen, end=seen.end + 1)),
        "wrong numbers",
    ),
    "masked key tiles left": Mistake(
        replaced("logits.LogitsVisitor", "_store_masked", nothing), "wrong numbers"
    ),
    "scales read behind a context": Mistake(
        with_arguments(
            "scales.ScaleLoader",
            "_copy",
            lambda a, p, s, *r: (a, p, replace(s, key_end=s.num_keys + 99), *r),
        ),
        "OutOfBounds",
    ),
    "the loader does not wait for the ring": Mistake(
        replaced("loader", "wait", nothing), "DataRace"
    ),
    "scales do not wait for the ring": Mistake(replaced("scales", "wait", nothing), "DataRace"),
    "MMAs wait for nothing": Mistake(replaced("mma", "wait", nothing), ""),
    "the epilogue waits for nothing": Mistake(replaced("epilogue", "wait", nothing), ""),
    "factors are not waited for": Mistake(replaced("epilogue", "wait", nothing), "", FP8),
    "scales published before they are copied": Mistake(copies_not_waited_for, ""),
    "one warp need not arrive": Mistake(replaced("barriers", "GROUP_WARPS", 3), ""),
    "one reader of factors need not arrive": Mistake(
        replaced("barriers", "GROUP_WARPS", 3), "", FP8
    ),
    "one warp too many": Mistake(replaced("barriers", "GROUP_WARPS", 5), "Deadlock"),
    "bytes expected twice": Mistake(
        changed("mbarrier_arrive_expect_tx", lambda barrier, n: (barrier, 2 * n)), "Deadlock"
    ),
    "no wait for tcgen05.ld": Mistake(without("tcgen05_wait", load), "UnwaitedLoad"),
    "no tcgen05 fence": Mistake(without("tcgen05_fence"), "MissingTensorFence"),
    "no proxy fence after scales": Mistake(without("fence_proxy"), "MissingProxyFence"),
    "tensor memory kept": Mistake(without("tcgen05_dealloc"), "TensorMemory"),
}


def problem_of(chosen: Chosen) -> Problem:
    """Problem in which one key has a scale of −NaN."""
    tile = chosen.tile
    problem = Case(**CASE, heads=tile.num_heads, head_dim=tile.head_dim).problem(tile.fmt)
    if tile.fmt == "nvfp4":
        keys = problem.keys[0]
        assert keys.scales is not None
        keys.scales.view(torch.uint8)[NAN_KEY] = 0xFF
        keys.values[NAN_KEY] = np.nan
    return problem


def outcome(chosen: Chosen) -> str:
    """First finding over all schedules."""
    problem = problem_of(chosen)
    for schedule in STANDARD:
        with devices.emulated_ops(schedule):
            try:
                run_paged(problem, torch.device("cpu"))
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


@pytest.mark.parametrize("chosen", [NVFP4, FP8], ids=["nvfp4", "fp8"])
def test_nothing_to_catch(chosen: Chosen, monkeypatch: pytest.MonkeyPatch) -> None:
    devices.cutlass_or_skip()
    with devices.emulated_ops(STANDARD[0]):
        chosen.use(monkeypatch)
    assert outcome(chosen) == "nothing"


def test_the_kernel_waits_for_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    devices.cutlass_or_skip()

    def twice() -> None:
        """Launch twice: the second launch's weights are the first one's scores."""
        arguments = Case(((20,), (20,)), heads=40).problem("nvfp4").contiguous()
        scores = indexer_logits(**arguments)
        indexer_logits(**arguments | {"weights": scores})

    with devices.emulated_ops(STANDARD[0]):
        twice()
        without("griddepcontrol", lambda action: str(action) == "wait")(monkeypatch)
        kernel_compile.compiled.cache_clear()
        with pytest.raises(MissingDependencyWait, match=r"griddepcontrol\.wait before the read"):
            twice()
    kernel_compile.compiled.cache_clear()
