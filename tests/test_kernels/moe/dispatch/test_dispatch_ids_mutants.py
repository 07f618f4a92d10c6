"""Mutants of ``moe_dispatch`` of expert ids: each mutant is reported, or wrong."""

from typing import Any

import pytest
import torch

from nvfp4_kernels import Ids, moe_dispatch
from tests.emulator import EAGER, randomised
from tests.mutants import ANYTHING, Mutant
from tests.mutants.kernels import (
    Room,
    check_caught,
    check_dependency_wait,
    check_nothing_to_catch,
    without_in,
)
from tests.test_kernels.moe.dispatch import test_dispatch_ids as op_tests
from tests.test_kernels.routing_cases import RoutingCase

KERNEL = Room("nvfp4_kernels.moe.dispatch")
SCHEDULES = EAGER, randomised(1)


def few_ctas(patch: pytest.MonkeyPatch) -> None:
    from importlib import import_module

    module: Any = import_module("nvfp4_kernels.moe.dispatch.launch")
    patch.setattr(module, "ctas_of_ids", lambda *_: 2)


MUTANTS = {
    "no barrier before slots are read": Mutant(without_in("barrier_cta_sync", "run"), ANYTHING),
    "no barrier before the sums": Mutant(without_in("barrier_cta_sync", "place_experts"), ANYTHING),
    "one tile fewer": Mutant(
        KERNEL.with_result("ids", "place_experts", lambda used: used - 1), ANYTHING
    ),
    "slots a row too far": Mutant(
        KERNEL.with_result("ids", "row_of", lambda row: row + (row >= 0).to(type(row))), ANYTHING
    ),
}


def check() -> None:
    op_tests.check_gather(RoutingCase(21, 4, 9, ids="hostile"), 48, torch.device("cpu"))


def test_nothing_to_catch() -> None:
    check_nothing_to_catch(check, few_ctas, schedules=SCHEDULES)


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_caught(mutant: Mutant) -> None:
    check_caught(mutant, check, few_ctas, schedules=SCHEDULES)


def twice() -> None:
    """Launch twice: the second launch takes rows written by the first as its expert ids."""
    case = RoutingCase(16, 2, 40)
    x = torch.randn(16, 32).bfloat16()
    routing = moe_dispatch(x, Ids(case.topk_ids(), 40, 8)).routing
    moe_dispatch(x, Ids(routing.rows, 40, 8))


def test_a_kernel_waits_for_the_one_before() -> None:
    check_dependency_wait(twice)
