"""Mutants of ``moe_combine``: each mutant's results are wrong."""

from typing import Any

import pytest
import torch

from nvfp4_kernels import moe_combine
from nvfp4_kernels.moe.combine import reference
from tests.emulator import EAGER
from tests.mutants import WRONG, Mutant, Patch
from tests.mutants.kernels import Room, check_caught, check_dependency_wait, check_nothing_to_catch
from tests.test_kernels.bits import check_equal
from tests.test_kernels.moe.combine.test_moe_combine import combine_arguments
from tests.test_kernels.routing_cases import CASES, RoutingCase

KERNEL = Room("nvfp4_kernels.moe.combine")


def fused(total: Any, values: Any, weight: Any) -> Any:
    """Mutant: round product and sum together, as a fused multiply-add."""
    import cutlass
    import cutlass.cute as cute

    sums = [cute.math.fma(values[n], weight, total[n]) for n in range(total.numel())]
    return cutlass.Vector.from_elements(tuple(sums), cutlass.Float32)


PATCHES = {
    "slots in reverse order": KERNEL.with_result(
        "kernel:MoeCombine", "_of_token", lambda numbers: numbers[::-1]
    ),
    "dropped slots are rows": KERNEL.with_result(
        "kernel:MoeCombine", "_of_token", lambda numbers: [n * (n >= 0) for n in numbers]
    ),
    "products not rounded": KERNEL.replaced("kernel", "_add", fused),
    "the next row": KERNEL.with_arguments(
        "kernel", "_load", lambda y, row, *rest: (y, row + 1, *rest)
    ),
    "weights left out": KERNEL.with_arguments(
        "kernel", "_add", lambda total, v, weight: (total, v, None)
    ),
}


def check() -> None:
    for name in ("ids of no expert", "384 experts"):
        y, rows, weights = combine_arguments(CASES[name], 48)
        arguments = y, rows, weights, torch.float32
        check_equal([moe_combine(*arguments)], [reference.moe_combine(*arguments)])


def test_nothing_to_catch() -> None:
    check_nothing_to_catch(check, schedules=[EAGER])


@pytest.mark.parametrize("patch", PATCHES.values(), ids=PATCHES)
def test_caught(patch: Patch) -> None:
    check_caught(Mutant(patch, WRONG), check, schedules=[EAGER])


def twice() -> None:
    """Launch two combines; the second sums the first one's result."""
    y, rows, _ = combine_arguments(RoutingCase(8, 2, 4), 16)
    same = torch.arange(8, dtype=torch.int32).unsqueeze(1)
    moe_combine(moe_combine(y, rows).unsqueeze(0), same)


def test_a_sum_waits_for_the_kernel_before() -> None:
    check_dependency_wait(twice)
