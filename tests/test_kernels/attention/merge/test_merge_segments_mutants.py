"""Mutants of the merge: the emulator reports each mutant, or its results are wrong."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from nvfp4_kernels import merge_segments
from nvfp4_kernels.attention.merge import reference
from tests.emulator import EAGER
from tests.mutants import WRONG, Mutant, Patch
from tests.mutants.kernels import (
    Room,
    check_caught,
    check_dependency_wait,
    check_nothing_to_catch,
    check_noticed,
)
from tests.test_kernels.attention.merge import test_merge_segments
from tests.test_kernels.attention.merge.test_merge_segments import CASES

CASE = CASES["17 segments"]  # more than a thread takes at a time
KERNEL = Room("nvfp4_kernels.attention.merge")
MERGE = "merge:SegmentMerge"


def copy_all_parts(copy: Callable[..., None]) -> Callable[..., None]:
    """Mutant: copy the results of segments without keys, too."""

    def copy_part(kernel: Any, segments: Any, first: Any, n: int, log: Any, slot: Any) -> None:
        import cutlass

        there_is = segments.inside & (first + n < segments.count)
        log = cutlass.select_(there_is, cutlass.Float32(0.0), log)
        copy(kernel, segments, first, n, log, slot)

    return copy_part


def blocks_not_rescaled(given: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Mutant: compute every weight from its own block's maximum."""
    uses = []

    def exp(x: Any) -> Any:
        uses.append(x)
        return given(x) if len(uses) > 1 else given(x * 0.0)

    return exp


PATCHES = {
    "weights of base 2": KERNEL.replaced("merge", "LOG2_E", 1.0),
    "LSE of base 2": KERNEL.replaced("merge", "LN_2", 1.0),
    "+inf taken for a value": KERNEL.replaced("merge", "INFINITY", 3e38),
    "NaN of an empty segment": KERNEL.swapped(MERGE, "_copy_part", copy_all_parts),
    "the next segment": KERNEL.with_arguments(
        MERGE, "_copy_part", lambda s, first, *rest: (s, (first + 1) % s.count, *rest)
    ),
    "the sink left out": KERNEL.with_arguments(
        MERGE, "_merge", lambda s, sink: (s, sink * 0.0 - 1e30)
    ),
    "sums not rescaled": KERNEL.swapped("merge", "_exp", blocks_not_rescaled),
}


def check() -> None:
    test_merge_segments.check_case(CASE, torch.device("cpu"))


def test_nothing_to_catch() -> None:
    check_nothing_to_catch(check, schedules=[EAGER])


@pytest.mark.parametrize("patch", PATCHES.values(), ids=PATCHES)
def test_caught(patch: Patch) -> None:
    check_caught(Mutant(patch, WRONG), check, schedules=[EAGER])


def twice() -> None:
    """Launch two merges; the second merges the first one's results."""
    merged = merge_segments(torch.randn(4, 3, 16), torch.randn(4, 3))
    merge_segments(*(x.unsqueeze(0) for x in merged))


def test_a_merge_waits_for_the_kernel_before() -> None:
    check_dependency_wait(twice)


def without_clearing(*arguments: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "masked_fill", lambda x, *_: x)
        return merged(*arguments)


merged = reference.merge_segments
REFERENCE_MUTANTS: dict[str, Callable[..., Any]] = {
    "LSE of base 2": lambda *a: (merged(*a)[0], merged(*a)[1] / 0.6931),
    "the sink left out": lambda outs, lses, sinks, dtype: merged(outs, lses, None, dtype),
    "segments of equal weight": lambda outs, lses, *rest: merged(
        outs, lses.where(lses.isinf(), 0), *rest
    ),
    "empty segments and +inf as they are": without_clearing,
}


@pytest.mark.parametrize("name", REFERENCE_MUTANTS)
def test_caught_in_the_reference(name: str) -> None:
    mutant = Mutant.replaced(reference, "merge_segments", REFERENCE_MUTANTS[name])
    check_noticed(mutant, partial(test_merge_segments.test_reference, CASES["sinks"]))
