"""Mutants of ``moe_dispatch`` to E4M3 on sm_90: each mutant is reported, or wrong."""

from functools import partial

import pytest
import torch

from nvfp4_kernels import PerTokenFp8, StaticFp8, moe_dispatch
from nvfp4_kernels.device.row_vectors.tile import VectorTile
from tests.emulator import EAGER, randomised
from tests.mutants import ANYTHING, WRONG, Mutant
from tests.mutants.kernels import (
    Room,
    check_caught,
    check_dependency_wait,
    check_nothing_to_catch,
    nothing,
    without_in,
)
from tests.test_kernels.moe.dispatch import test_dispatch_fp8_sm90 as kernel_tests
from tests.test_kernels.moe.dispatch.test_dispatch_fp8_sm90 import use
from tests.test_kernels.moe.dispatch.test_dispatch_tiles import routed
from tests.test_kernels.routing_cases import RoutingCase

KERNEL = Room("nvfp4_kernels.moe.dispatch")
ROWS = Room("nvfp4_kernels.device.row_vectors")
SM90 = {"arch": "sm_90", "schedules": (EAGER, randomised(1))}
FEW_CTAS = partial(use, tile=VectorTile(64, 1), ctas=2)

MUTANTS = {
    "a tile too many": Mutant(
        KERNEL.with_result("tokens", "load_count", lambda count: count + 1), ANYTHING
    ),
    "tokens of one slot more": Mutant(
        KERNEL.with_arguments(
            "gather", "first_element", lambda slot, row, top_k, k: (slot, row, top_k + 1, k)
        ),
        WRONG,
    ),
    "the next slot, and in padding the first": Mutant(
        KERNEL.with_result("gather", "load_slot", lambda slot: slot + 1), ANYTHING
    ),
    "weights left out": Mutant(
        KERNEL.with_result("gather", "load_weight", lambda weight: weight * 0.0 + 1.0), WRONG
    ),
    "tokens of padding are read": Mutant(
        KERNEL.with_arguments(
            "gather",
            "load_vector",
            lambda source, index, there_is: (source, index, index > -(2**40)),
        ),
        ANYTHING,
    ),
    "no barrier between turns": Mutant(without_in("barrier_cta_sync", "_run_items"), ANYTHING),
    "no barrier within a row": Mutant(without_in("barrier_cta_sync", "reduce_cta"), ANYTHING),
    "scales of rows unwritten": Mutant(ROWS.replaced("fp8", "_store_row_scale", nothing), WRONG),
    "bytes as they are loaded": Mutant(
        ROWS.with_result("fp8", "_swapped", lambda word: word * 0), WRONG
    ),
}


def check() -> None:
    x, routing = routed(RoutingCase(11, 2, 3, ids="hostile"), 16 * 5)
    weights = torch.rand(routing.rows.shape)
    kernel_tests.check(x, routing, torch.device("cpu"), PerTokenFp8(), weights)


def test_nothing_to_catch() -> None:
    check_nothing_to_catch(check, FEW_CTAS, **SM90)


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_caught(mutant: Mutant) -> None:
    check_caught(mutant, check, FEW_CTAS, **SM90)


def twice() -> None:
    """Launch twice: copy tokens into tiles, then quantise the rows of these tiles."""
    x, routing = routed(RoutingCase(6, 2, 3), 64)
    moe_dispatch(moe_dispatch(x, routing).data, routing, StaticFp8(torch.tensor(0.01)))


def test_a_kernel_waits_for_the_one_before() -> None:
    check_dependency_wait(twice, arch="sm_90")
