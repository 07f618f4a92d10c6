"""Mistakes made on purpose in the merge of segments: each reported or seen in the numbers."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch

from nvfp4_kernels import compile as kernel_compile
from nvfp4_kernels import merge_segments
from nvfp4_kernels.merge_segments import reference
from tests import devices
from tests.emulator import EAGER
from tests.emulator.findings import MissingDependencyWait
from tests.test_kernels.merge_segments import test_merge_segments
from tests.test_kernels.merge_segments.test_merge_segments import CASES

Patch = Callable[[pytest.MonkeyPatch, Any], None]
CASE = CASES["17 segments"]  # more than a thread takes at a time
MODULE = "nvfp4_kernels.merge_segments.sm100"


def constant(name: str, value: float) -> Patch:
    return lambda patch, module: patch.setattr(module, name, value)


def method(name: str, change: Callable[..., tuple[Any, ...]]) -> Patch:
    """Changes the arguments of a method."""

    def apply(patch: pytest.MonkeyPatch, module: Any) -> None:
        kernel = module.MergeSegmentsSm100
        given = getattr(kernel, name)
        patch.setattr(kernel, name, lambda self, *args: given(self, *change(*args)))

    return apply


def copy_all_parts(patch: pytest.MonkeyPatch, module: Any) -> None:
    """Those of segments without keys too."""
    copy = module.MergeSegmentsSm100._copy_part

    def copy_part(kernel: Any, segments: Any, first: Any, n: int, log: Any, slot: Any) -> None:
        there_is = segments.inside & (first + n < segments.count)
        copy(kernel, segments, first, n, select(there_is, module.Float32(0.0), log), slot)

    select = module.cutlass.select_
    patch.setattr(module.MergeSegmentsSm100, "_copy_part", copy_part)


def blocks_not_rescaled(patch: pytest.MonkeyPatch, module: Any) -> None:
    """Every weight is taken from its own block's maximum."""
    given, uses = module._exp, []

    def exp(x: Any) -> Any:
        uses.append(x)
        return given(x) if len(uses) > 1 else given(x * 0.0)

    patch.setattr(module, "_exp", exp)


MISTAKES: dict[str, Patch] = {
    "weights of base 2": constant("LOG2_E", 1.0),
    "LSE of base 2": constant("LN_2", 1.0),
    "+inf taken for a value": constant("INFINITY", 3e38),
    "NaN of an empty segment": copy_all_parts,
    "the next segment": method(
        "_copy_part", lambda s, first, *rest: (s, (first + 1) % s.count, *rest)
    ),
    "the sink left out": method("_merge", lambda s, sink: (s, sink * 0.0 - 1e30)),
    "sums not rescaled": blocks_not_rescaled,
}


def test_nothing_to_catch() -> None:
    devices.cutlass_or_skip()
    with devices.emulated_ops(EAGER):
        test_merge_segments.check_case(CASE, torch.device("cpu"))


@pytest.mark.parametrize("name", MISTAKES)
def test_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    devices.cutlass_or_skip()
    with devices.emulated_ops(EAGER):
        MISTAKES[name](monkeypatch, import_module(MODULE))
        kernel_compile.compiled.cache_clear()
        try:
            with pytest.raises(AssertionError):
                test_merge_segments.check_case(CASE, torch.device("cpu"))
        finally:
            kernel_compile.compiled.cache_clear()


def test_a_merge_waits_for_the_kernel_before(monkeypatch: pytest.MonkeyPatch) -> None:
    devices.cutlass_or_skip()
    outs, lses = torch.randn(4, 3, 16), torch.randn(4, 3)

    def twice() -> None:
        merge_segments(*(x.unsqueeze(0) for x in merge_segments(outs, lses)))

    with devices.emulated_ops(EAGER):
        twice()
        from cutlass.experimental import primitives as ptx

        given = ptx.griddepcontrol
        monkeypatch.setattr(ptx, "griddepcontrol", lambda a: None if str(a) == "wait" else given(a))
        kernel_compile.compiled.cache_clear()
        try:
            with pytest.raises(MissingDependencyWait):
                twice()
        finally:
            kernel_compile.compiled.cache_clear()


def without_clearing(*arguments: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "masked_fill", lambda x, *_: x)
        return merged(*arguments)


merged = reference.merge_segments
REFERENCE_MISTAKES: dict[str, Callable[..., Any]] = {
    "LSE of base 2": lambda *a: (merged(*a)[0], merged(*a)[1] / 0.6931),
    "the sink left out": lambda outs, lses, sinks, dtype: merged(outs, lses, None, dtype),
    "segments of equal weight": lambda outs, lses, *rest: merged(
        outs, lses.where(lses.isinf(), 0), *rest
    ),
    "empty segments and +inf as they are": without_clearing,
}


@pytest.mark.parametrize("name", REFERENCE_MISTAKES)
def test_caught_in_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    test_merge_segments.test_reference(CASES["sinks"])
    monkeypatch.setattr(reference, "merge_segments", REFERENCE_MISTAKES[name])
    with pytest.raises(AssertionError):
        test_merge_segments.test_reference(CASES["sinks"])
