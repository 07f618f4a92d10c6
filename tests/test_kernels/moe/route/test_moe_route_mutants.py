"""Mutants of ``moe_route``: each mutant is reported, or its results are wrong."""

from functools import partial
from typing import Any

import pytest

from nvfp4_kernels import moe_route
from nvfp4_kernels.moe.route.tile import RouteTile
from tests.emulator import EAGER, randomised
from tests.mutants import ANYTHING, WRONG, Mutant
from tests.mutants.kernels import (
    Room,
    check_caught,
    check_dependency_wait,
    check_nothing_to_catch,
    nothing,
    without,
    without_in,
)
from tests.test_kernels.moe.route.test_moe_route_kernel import use
from tests.test_kernels.routing_cases import RoutingCase, check_routing

KERNEL = Room("nvfp4_kernels.moe.route")
SCHEDULES = EAGER, randomised(1)
PAIR = partial(use, tile=RouteTile(64, cluster=2, steps=2))


def lanes_after(lane: Any, lanes: Any) -> Any:
    """Mutant: rank lanes in descending order."""
    import cutlass.cute as cute
    from cutlass import Uint32

    return cute.arch.popc((lanes.bitcast(Uint32) >> Uint32(lane)) >> Uint32(1))


MUTANTS = {
    "a tile too many": Mutant(
        KERNEL.with_result("kernel", "place_experts", lambda used: used + 1), WRONG
    ),
    "slots from the last lane on": Mutant(
        KERNEL.replaced("sort", "count_lanes_before", lanes_after), WRONG
    ),
    "experts and padding unwritten": Mutant(
        KERNEL.replaced("kernel", "write_tiles", nothing), WRONG
    ),
    "nothing before a CTA's slots": Mutant(
        KERNEL.with_result("sort", "_sum_cluster", lambda sums: (sums[0] * 0, sums[1])), ANYTHING
    ),
    "rank of the warp alone": Mutant(
        KERNEL.with_result("sort", "_sum_warps", lambda total: total + 1), WRONG
    ),
    "ids of no expert taken": Mutant(
        KERNEL.replaced("sort", "_expert", lambda sort, batch, number: number), ANYTHING
    ),
    "no barrier before sums": Mutant(without_in("barrier_cta_sync", "place_experts"), ANYTHING),
    "no barrier after counts are cleared": Mutant(
        without_in("barrier_cta_sync", "prepare"), ANYTHING
    ),
    "no barrier before totals are read": Mutant(
        without_in("barrier_cta_sync", "cta_exclusive_sum"), ANYTHING
    ),
    "no barrier between lanes": Mutant(without("bar_warp_sync"), ANYTHING),
    "no wait for peers": Mutant(without("barrier_cluster_wait"), ANYTHING),
    "peers are not told": Mutant(without("barrier_cluster_arrive"), ANYTHING),
}


def check() -> None:
    case = RoutingCase(61, 4, 9, ids="hostile")
    ids = case.topk_ids()
    found = moe_route(ids, case.experts, case.tile_tokens)
    check_routing(found, ids, None, case.experts, case.tile_tokens)


def test_nothing_to_catch() -> None:
    check_nothing_to_catch(check, PAIR, schedules=SCHEDULES)


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_caught(mutant: Mutant) -> None:
    check_caught(mutant, check, PAIR, schedules=SCHEDULES)


def twice() -> None:
    """Launch twice: the second launch takes rows written by the first as its expert ids."""
    case = RoutingCase(16, 2, 40)
    moe_route(moe_route(case.topk_ids(), 40, 8).rows, 40, 8)


def test_a_sort_waits_for_the_kernel_before() -> None:
    check_dependency_wait(twice)
