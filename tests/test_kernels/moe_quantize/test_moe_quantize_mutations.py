"""Mistakes made on purpose in the kernels that bring tokens into tiles: each is noticed."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_kernels import moe_gather, moe_quantize, moe_quantize_per_token, moe_route
from nvfp4_kernels.devices import standing_in
from nvfp4_kernels.moe_quantize import reference
from nvfp4_kernels.routing import Routing
from tests.emulator import EAGER
from tests.test_kernels.mistakes import (
    ANYTHING,
    WRONG,
    Check,
    Mistake,
    Patch,
    Room,
    check_caught,
    check_dependency_wait,
    check_nothing_to_catch,
    nothing,
)
from tests.test_kernels.moe_quantize.test_moe_quantize import routed
from tests.test_kernels.moe_quantize.test_moe_quantize_kernels import check_in_use, on
from tests.test_kernels.routing_cases import RoutingCase

CPU = torch.device("cpu")
ROOM = Room("nvfp4_kernels.moe_quantize")
SCALE = torch.tensor(0.004)
LINES = RoutingCase(9, 2, 3, ids="hostile")  # a row of a tile to a line of its atoms
ATOMS = RoutingCase(9, 2, 5, 64, ids="one")


@functools.cache
def problem(case: RoutingCase) -> tuple[Tensor, Routing, Tensor]:
    """Tokens, what the reference makes of their experts, and weights of their slots."""
    with standing_in("cpu", "cpu"), torch.random.fork_rng():
        torch.manual_seed(1)  # whichever test comes first
        x, routing = routed(case, 80)
        return x, routing, torch.rand(routing.rows.shape)


def quantizes(case: RoutingCase) -> None:
    x, routing, weights = problem(case)
    found = moe_quantize_per_token(x, on(CPU, routing), weights)
    check_in_use(found, reference.moe_quantize_per_token(x, routing, weights, 1), routing)


def quantizes_lines() -> None:
    quantizes(LINES)


def quantizes_atoms() -> None:
    quantizes(ATOMS)


def quantizes_in_tiles() -> None:
    """Rows that lie in tiles, NaN in those of padding."""
    x, routing, _ = problem(LINES)
    in_tiles = reference.moe_gather(x, routing, None)
    in_tiles[routing.slots < 0] = torch.nan
    found = moe_quantize(in_tiles, on(CPU, routing), SCALE)
    check_in_use(found, reference.moe_quantize(in_tiles, routing, SCALE, None, 1), routing)


def gathers() -> None:
    x, routing, weights = problem(LINES)
    found = moe_gather(x, on(CPU, routing), weights)
    check_in_use((found,), (reference.moe_gather(x, routing, weights),), routing)


CHECKS = (quantizes_lines, quantizes_atoms, quantizes_in_tiles, gathers)


def padding_for_a_slot(slot: Any) -> Any:
    """Slot 0 in the place of none."""
    import cutlass

    return cutlass.select_(slot < 0, cutlass.Int32(0), slot)


def without_rows_of_padding(write: Callable[..., None]) -> Callable[..., None]:
    """Write rows of slots alone."""

    def write_slots(rows: Any, tokens: Any, slots: Any, first: Any, out: Any, place: Any) -> None:
        slot = rows._slot(slots, place, first)
        write(rows, tokens, slots, first, out, replace(place, inside=place.inside & (slot >= 0)))

    return write_slots


def not_rounded(elements: Any, weight: Any) -> Any:
    """Weigh, but leave the product in float32."""
    import cutlass

    return elements.to(cutlass.Float32) * weight


def of_both(patch: Callable[[str], Patch], caught: str) -> dict[str, tuple[Patch, str, Check]]:
    """The same mistake in both kernels, which share how tokens are found."""
    return {
        "quantise": (patch("sm100"), caught, quantizes_lines),
        "gather": (patch("gather"), caught, gathers),
    }


SHARED = {
    "a tile too few": of_both(lambda m: ROOM.with_result(m, "load_count", lambda n: n - 1), WRONG),
    "a tile too many": of_both(
        lambda m: ROOM.with_result(m, "load_count", lambda n: n + 1), ANYTHING
    ),
    "slots for tokens": of_both(
        lambda m: ROOM.with_arguments(
            m, "first_element", lambda slot, row, top_k, k: (slot, row, 1, k)
        ),
        ANYTHING,
    ),
    "the weight of another slot": of_both(
        lambda m: ROOM.with_arguments(m, "load_weight", lambda source, slot: (source, slot ^ 1)),
        WRONG,
    ),
    "padding read": of_both(
        lambda m: ROOM.with_result(m, "load_slot", padding_for_a_slot), ANYTHING
    ),
}
MISTAKES: dict[str, tuple[Patch, str, Check]] = {
    **{f"{name}, {op}": m for name, both in SHARED.items() for op, m in both.items()},
    "padding read, in tiles": (
        ROOM.with_result("sm100", "load_slot", padding_for_a_slot),
        WRONG,
        quantizes_in_tiles,
    ),
    "rows of padding not written": (
        ROOM.swapped("sm100:MoeRows", "write", without_rows_of_padding),
        WRONG,
        quantizes_lines,
    ),
    "lines without rows not written": (
        ROOM.with_result("sm100", "find_in_lines", lambda place: replace(place, line_rows=32)),
        WRONG,
        quantizes_lines,
    ),
    "atoms' padding not written": (
        ROOM.replaced("sm100", "store_padding", nothing),
        WRONG,
        quantizes_atoms,
    ),
    "weighed tokens not rounded": (
        ROOM.replaced("sm100", "weigh", not_rounded),
        WRONG,
        quantizes_lines,
    ),
}


@pytest.mark.parametrize("case", [LINES, ATOMS])
def test_cases_have_padding(case: RoutingCase) -> None:
    """Padding in tiles in use, and tiles that are not."""
    routing = problem(case)[1]
    used = int(routing.groups[0])
    assert 0 < used < len(routing.slots)
    assert (routing.slots[:used] < 0).any()


@pytest.mark.parametrize("check", CHECKS)
def test_nothing_to_catch(check: Check) -> None:
    check_nothing_to_catch(check, schedules=[EAGER])


@pytest.mark.parametrize("name", MISTAKES)
def test_caught(name: str) -> None:
    patch, caught, check = MISTAKES[name]
    check_caught(Mistake(patch, caught), check, schedules=[EAGER])


def routes_and_quantizes() -> None:
    x = torch.randn(4, 32).bfloat16()
    moe_quantize(x, moe_route(torch.zeros(4, 1, dtype=torch.int32), 2, 8), SCALE)


def routes_and_gathers() -> None:
    x = torch.randn(4, 32).bfloat16()
    moe_gather(x, moe_route(torch.zeros(4, 1, dtype=torch.int32), 2, 8))


def gathers_and_quantizes() -> None:
    x, routing, _ = problem(LINES)
    moe_quantize(moe_gather(x, routing), routing, SCALE)


@pytest.mark.parametrize("twice", [routes_and_quantizes, routes_and_gathers, gathers_and_quantizes])
def test_kernels_wait_for_the_one_before(twice: Check) -> None:
    check_dependency_wait(twice)
