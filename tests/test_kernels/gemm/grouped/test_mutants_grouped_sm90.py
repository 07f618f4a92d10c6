"""Mutants of grouped GEMM on sm_90: each mutant is reported, or its results are wrong."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from nvfp4_kernels.gemm.sm90.tile import Tile
from tests import devices
from tests.devices import KernelDevice
from tests.emulator import STANDARD
from tests.emulator.findings import MissingDependencyWait
from tests.mutants import WRONG, Mutant
from tests.mutants.kernels import Room, check_caught, check_nothing_to_catch
from tests.test_kernels.gemm.grouped import chain_sm90
from tests.test_kernels.gemm.grouped.test_tiles_grouped_sm90 import FEW, put_to_the_test
from tests.test_kernels.gemm.grouped.tiles_sm90 import check, grid_operands, stored

KERNEL = Room("nvfp4_kernels.gemm.sm90")
SM90 = {"arch": "sm_90", "takes_device": True}
Run = Callable[[KernelDevice], None]


def family(name: str, early: bool = False) -> Run:
    return lambda device: put_to_the_test(device, name, 1, early)


def idle(device: KernelDevice) -> None:
    """Check with more CTAs than tiles: even idle CTAs load weights before the dependency wait."""
    tile = Tile(8, warpgroups=1, split_k=8, max_stages=2, grouped=True, routed_before=True)
    given = grid_operands(FEW, 72, 1024, gated=False)
    check(device, tile, stored(tile, 72, boxes=False), given, sms=132)


def routed(device: KernelDevice) -> None:
    chain_sm90.product_after_routing(device, chain_sm90.FIRST)


MMA_SYNC = family("mma.sync")


def edited(module: str, right: str, wrong: str, caught: str, on: Run = MMA_SYNC) -> Mutant:
    return Mutant(KERNEL.edited(module, right, wrong), caught, on)


_WAIT = "ptx.griddepcontrol(ptx.GridDepAction.WAIT)\n        state"
_PAIR = family("mma.sync, gate and up")
MUTANTS = {
    "expert of the tile before": edited(
        "scheduler", "load(1 + tokens)", "load(tokens)", "OutOfBounds"
    ),
    "expert of the tile after": edited(
        "scheduler", "load(1 + tokens)", "load(2 + tokens)", "UninitialisedRead"
    ),
    "one tile more than are in use": edited(
        "scheduler", ".load(0))", ".load(0) + 1)", "UninitialisedRead"
    ),
    "one tile less": edited("scheduler", ".load(0))", ".load(0) - 1)", WRONG),
    "experts of tiles that are not in use": edited(
        "scheduler",
        "if index < state.num_tiles:",
        "if index >= 0:",
        "UninitialisedRead",
        idle,
    ),
    "weights of the first expert": edited(
        "loader", "rows += Int64(matrix", "rows += 0 * Int64(matrix", WRONG
    ),
    "experts' weights closer than they are": edited(
        "loader",
        "(matrix(tile, coord, operand)) * cute.ceil_div(n, TILE)",
        "(matrix(tile, coord, operand)) * (n // TILE)",
        WRONG,
    ),
    "gate's weight for up": edited(
        "scheduler", "+ product % tile.weights", "+ 0 * product", WRONG, _PAIR
    ),
    "experts one weight apart": edited(
        "scheduler", "coord.expert * tile.weights", "coord.expert", WRONG, _PAIR
    ),
    "alpha of the other shard": edited(
        "scaling", "alpha.load(matrix(tile, coord, w))", "alpha.load(matrix(tile, coord, 1 - w))",
        WRONG, _PAIR,
    ),
    "alpha of the first expert": edited(
        "scaling", "alpha.load(matrix(tile, coord, w))", "alpha.load(w)", WRONG
    ),
    "rows stored beyond the tile": edited(
        "epilogue",
        "if vector < vectors:",
        "if vector >= 0:",
        "ArrayOverrun",
        family("mma.sync, split"),
    ),
    "boxes stored a row further on": edited(
        "epilogue",
        "return coord.tokens * tile.tokens +",
        "return 1 + coord.tokens * tile.tokens +",
        WRONG,
        family("wgmma"),
    ),
    "weights loaded without a tile": edited(
        "loader", "ahead = cutlass.min(ahead, ahead * state.num_tiles)", "pass", "ExitedPeer", idle
    ),
    "the count is not waited for": edited(
        "kernel", _WAIT, "state", "MissingDependencyWait", routed
    ),
    "tokens loaded before the wait": edited(
        "loader",
        "        ptx.griddepcontrol(ptx.GridDepAction.WAIT)\n",
        "",
        "MissingDependencyWait",
        chain_sm90.layer,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_caught(name: str) -> None:
    check_caught(MUTANTS[name], MUTANTS[name].on, **SM90)


@pytest.mark.parametrize("run", [idle, routed, chain_sm90.layer])
def test_nothing_to_catch(run: Run) -> None:
    check_nothing_to_catch(run, KERNEL.edited(), **SM90)


def test_a_first_product_may_not_come_early() -> None:
    """``routed_before`` on the product right after the routing is reported."""
    devices.cutlass_or_skip()
    with (
        devices.emulated(STANDARD[0], "sm_90") as device,
        pytest.raises(MissingDependencyWait, match=r"griddepcontrol\.wait before the read"),
    ):
        chain_sm90.product_after_routing(device, replace(chain_sm90.FIRST, routed_before=True))
