"""Mutants of ``moe_dispatch`` of router logits: each mutant is reported, or wrong."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch

from nvfp4_kernels import Logits, moe_dispatch, moe_topk
from nvfp4_kernels.moe.router import Router
from tests.emulator import EAGER, randomised
from tests.mutants import ANYTHING, Mutant, Patch
from tests.mutants.kernels import (
    Room,
    check_caught,
    check_dependency_wait,
    check_nothing_to_catch,
    nothing,
    without_in,
)
from tests.test_kernels.moe.dispatch import test_dispatch_logits as op_tests
from tests.test_kernels.moe.topk.test_moe_topk_kernel import check as check_choice
from tests.test_kernels.router_cases import CASES, RouterCase

CHOICE = Room("nvfp4_kernels.moe.topk")
ROUTE = Room("nvfp4_kernels.moe.dispatch")
SCHEDULES = EAGER, randomised(1)
OF_TOKEN = "choice:TokenChoice"


def few_ctas(patch: pytest.MonkeyPatch) -> None:
    module: Any = import_module("nvfp4_kernels.moe.dispatch.launch")
    patch.setattr(module, "ctas_of_logits", lambda *_: 8)


def own_memory(given: Any) -> Any:
    """Mutant: read the CTA's own shared memory instead of a peer's."""

    class Primitives:
        def __getattr__(self, name: str) -> Any:
            return (lambda array, rank: array) if name == "mapa" else getattr(given, name)

    return Primitives()


def orders_as_they_are(self: Any, *given: Any) -> Any:
    """Mutant: do not exclude the chosen expert, or the experts outside the chosen groups."""
    return next(each for each in given if isinstance(each, list))


ROUTE_MUTANTS = {
    "no wait for peers' choices": without_in("barrier_cluster_wait", "_sync"),
    "peers are not told": without_in("barrier_cluster_arrive", "run"),
    "exit while peers read": without_in("barrier_cluster_wait", "finish"),
    "no barrier before slots are read": without_in("barrier_cta_sync", "run"),
    "a CTA's own choices alone": ROUTE.swapped("logits", "ptx", own_memory),
    "a slot's neighbour": ROUTE.with_arguments(
        "logits:TopkRoute", "_id", lambda batch, memory, slot: (batch, memory, slot ^ 1)
    ),
    "experts and padding unwritten": ROUTE.replaced("logits", "write_tiles", nothing),
    "a tile fewer": ROUTE.with_result("logits", "place_experts", lambda used: used - 1),
}


def choosing(patch: Patch, case: str) -> Mutant:
    return Mutant(patch, ANYTHING, case)


CHOICE_MUTANTS = {
    "an expert twice": choosing(CHOICE.replaced(OF_TOKEN, "_without", orders_as_they_are), "Qwen3"),
    "no expert of equal ones": choosing(CHOICE.replaced("choice", "NONE", -1), "ties of float32"),
    "groups do not matter": choosing(
        CHOICE.replaced(OF_TOKEN, "_within", orders_as_they_are), "DeepSeek V2"
    ),
    "groups are alike": choosing(
        CHOICE.with_result("choice", "value_of", lambda value: value * 0.0), "DeepSeek V3"
    ),
    "a score is another": choosing(
        CHOICE.with_result("choice", "sigmoid", lambda score: score + 0.01), "sigmoids as they are"
    ),
}


def check_route() -> None:
    case = op_tests.Case(RouterCase(61, 16, Router(4), padded=True), ranks=2)
    op_tests.check_gather(case, 48, torch.device("cpu"))


def test_nothing_to_catch() -> None:
    check_nothing_to_catch(check_route, few_ctas, schedules=SCHEDULES)


@pytest.mark.parametrize("patch", ROUTE_MUTANTS.values(), ids=ROUTE_MUTANTS)
def test_caught(patch: Patch) -> None:
    check_caught(Mutant(patch, ANYTHING), check_route, few_ctas, schedules=SCHEDULES)


@pytest.mark.parametrize("mutant", CHOICE_MUTANTS.values(), ids=CHOICE_MUTANTS)
def test_wrong_choice(mutant: Mutant) -> None:
    check = partial(check_choice, CASES[mutant.on], torch.device("cpu"))
    check_caught(mutant, check, schedules=SCHEDULES[:1])


def twice() -> None:
    """Launch twice: the second launch takes routing weights written by the first as its logits."""
    x = torch.randn(16, 32).bfloat16()
    weights = moe_dispatch(x, Logits(torch.randn(16, 8), Router(2), 8, 8)).topk_weights
    assert weights is not None
    moe_dispatch(x, Logits(weights, Router(1), 2, 8))


def choice_twice() -> None:
    moe_topk(moe_topk(torch.randn(9, 8), Router(4))[0], Router(2))


@pytest.mark.parametrize("launches", [twice, choice_twice])
def test_a_kernel_waits_for_the_one_before(launches: Callable[[], None]) -> None:
    check_dependency_wait(launches)
