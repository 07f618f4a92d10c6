"""Mutants of ``moe_dispatch`` of a routing: each mutant is reported, or wrong."""

from functools import partial

import pytest
import torch

from nvfp4_kernels import Static, moe_dispatch
from nvfp4_kernels.device.rowwise.tile import RowTile
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
from tests.test_kernels.moe.dispatch import test_dispatch_tiles_kernels as kernel_tests
from tests.test_kernels.moe.dispatch.test_dispatch_tiles import routed
from tests.test_kernels.moe.dispatch.test_dispatch_tiles_kernels import use
from tests.test_kernels.routing_cases import RoutingCase

KERNEL = Room("nvfp4_kernels.moe.dispatch")
PLACE = Room("nvfp4_kernels.device.rowwise")
SCHEDULES = EAGER, randomised(1)
FEW_CTAS = partial(use, tile=RowTile(2, 2, 1), ctas=2)

MUTANTS = {
    "a tile too many": Mutant(
        KERNEL.with_result("tokens", "load_count", lambda count: count + 1), ANYTHING
    ),
    "tokens of one slot more": Mutant(
        KERNEL.with_arguments(
            "quantize", "first_element", lambda slot, row, top_k, k: (slot, row, top_k + 1, k)
        ),
        WRONG,
    ),
    "the next slot, and in padding the first": Mutant(
        KERNEL.with_result("quantize", "load_slot", lambda slot: slot + 1), ANYTHING
    ),
    "weights left out": Mutant(
        KERNEL.with_result("quantize", "load_weight", lambda weight: weight * 0.0 + 1.0), WRONG
    ),
    "lines of padding unwritten": Mutant(PLACE.replaced("place", "ATOM_LINES", 8), WRONG),
    "scales of a line in another order": Mutant(
        PLACE.with_result("place", "_gathered", lambda word: (word << 8) | (word >> 24)), WRONG
    ),
    "no barrier between turns": Mutant(
        without_in("barrier_cta_sync", "_run_items_of_tiles"), ANYTHING
    ),
    "no barrier within a row": Mutant(without_in("barrier_cta_sync", "reduce_row"), ANYTHING),
}


def check(per_token: bool = True) -> None:
    x, routing = routed(RoutingCase(11, 2, 3, ids="hostile"), 16 * 5)
    weights = torch.rand(routing.rows.shape)
    kernel_tests.check(x, routing, torch.device("cpu"), weights, per_token=per_token)


def test_nothing_to_catch() -> None:
    check_nothing_to_catch(check, FEW_CTAS, schedules=SCHEDULES)


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_caught(mutant: Mutant) -> None:
    check_caught(mutant, check, FEW_CTAS, schedules=SCHEDULES)


def test_padding_that_nobody_writes_is_seen() -> None:
    """Unwritten padding is noticed even with one global scale, which leaves padding unquantised."""
    mutant = Mutant(PLACE.replaced("output:RowQuantizer", "write_zeros", nothing), WRONG)
    check_caught(mutant, partial(check, per_token=False), FEW_CTAS, schedules=[EAGER])


def twice() -> None:
    """Launch twice: copy tokens into tiles, then quantise the rows of these tiles."""
    x, routing = routed(RoutingCase(6, 2, 3), 64)
    moe_dispatch(moe_dispatch(x, routing).data, routing, Static(torch.tensor(0.01)))


def test_a_kernel_waits_for_the_one_before() -> None:
    check_dependency_wait(twice)
