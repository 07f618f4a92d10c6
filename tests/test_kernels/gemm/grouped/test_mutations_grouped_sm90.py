"""Mutation tests of grouped GEMM on sm_90: each mutant is reported, or its results are wrong."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from nvfp4_kernels.gemm.sm90.tile import Tile
from tests import devices
from tests.devices import KernelDevice
from tests.emulator import STANDARD
from tests.emulator.findings import MissingDependencyWait
from tests.test_kernels.changed_source import changed_source
from tests.test_kernels.gemm.grouped import chain_sm90
from tests.test_kernels.gemm.grouped.test_tiles_grouped_sm90 import FEW, put_to_the_test
from tests.test_kernels.gemm.grouped.tiles_sm90 import check, grid_operands, stored
from tests.test_kernels.mistakes import NOTHING, WRONG, noticed

PACKAGE = "nvfp4_kernels.gemm.sm90"
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


@dataclass(frozen=True)
class Mistake:
    """Source text that occurs once, its replacement, and the expected finding's class, or WRONG."""

    module: str
    right: str
    wrong: str
    caught: str
    on: Run = MMA_SYNC


_WAIT = "ptx.griddepcontrol(ptx.GridDepAction.WAIT)\n        state"
_PAIR = family("mma.sync, gate and up")
MISTAKES = {
    "expert of the tile before": Mistake(
        "scheduler", "load(1 + tokens)", "load(tokens)", "OutOfBounds"
    ),
    "expert of the tile after": Mistake(
        "scheduler", "load(1 + tokens)", "load(2 + tokens)", "UninitialisedRead"
    ),
    "one tile more than are in use": Mistake(
        "scheduler", ".load(0))", ".load(0) + 1)", "UninitialisedRead"
    ),
    "one tile less": Mistake("scheduler", ".load(0))", ".load(0) - 1)", WRONG),
    "experts of tiles that are not in use": Mistake(
        "scheduler",
        "if index < state.num_tiles:",
        "if index >= 0:",
        "UninitialisedRead",
        idle,
    ),
    "weights of the first expert": Mistake(
        "loader", "rows += Int64(matrix", "rows += 0 * Int64(matrix", WRONG
    ),
    "experts' weights closer than they are": Mistake(
        "loader",
        "(matrix(tile, coord, operand)) * cute.ceil_div(n, TILE)",
        "(matrix(tile, coord, operand)) * (n // TILE)",
        WRONG,
    ),
    "gate's weight for up": Mistake(
        "scheduler", "+ product % tile.weights", "+ 0 * product", WRONG, _PAIR
    ),
    "experts one weight apart": Mistake(
        "scheduler", "coord.expert * tile.weights", "coord.expert", WRONG, _PAIR
    ),
    "alpha of the other shard": Mistake(
        "epilogue", "alpha.load(matrix(tile, coord, w))", "alpha.load(matrix(tile, coord, 1 - w))",
        WRONG, _PAIR,
    ),
    "alpha of the first expert": Mistake(
        "epilogue", "alpha.load(matrix(tile, coord, w))", "alpha.load(w)", WRONG
    ),
    "rows stored beyond the tile": Mistake(
        "epilogue", " and token < tile.tokens", "", "ArrayOverrun", family("mma.sync, split")
    ),
    "boxes stored a row further on": Mistake(
        "epilogue",
        "return coord.tokens * tile.tokens +",
        "return 1 + coord.tokens * tile.tokens +",
        WRONG,
        family("wgmma"),
    ),
    "weights loaded without a tile": Mistake(
        "loader", "ahead = cutlass.min(ahead, ahead * state.num_tiles)", "pass", "ExitedPeer", idle
    ),
    "the count is not waited for": Mistake(
        "kernel", _WAIT, "state", "MissingDependencyWait", routed
    ),
    "tokens loaded before the wait": Mistake(
        "loader",
        "        ptx.griddepcontrol(ptx.GridDepAction.WAIT)\n",
        "",
        "MissingDependencyWait",
        chain_sm90.layer,
    ),
}  # fmt: skip


def outcome(run: Run) -> str:
    """Return the first finding over all schedules."""
    for schedule in STANDARD:
        with devices.emulated(schedule, "sm_90") as device:
            found = noticed(lambda: run(device))
            if found != NOTHING:
                return found
    return NOTHING


@pytest.mark.parametrize("name", MISTAKES)
def test_caught(name: str, tmp_path: Path) -> None:
    devices.cutlass_or_skip()
    mistake = MISTAKES[name]
    with changed_source(PACKAGE, tmp_path / "sm90", mistake.module, mistake.right, mistake.wrong):
        found = outcome(mistake.on)
    print(found)
    assert found != NOTHING
    assert found.startswith(mistake.caught)


@pytest.mark.parametrize("run", [idle, routed, chain_sm90.layer])
def test_nothing_to_catch(run: Run, tmp_path: Path) -> None:
    devices.cutlass_or_skip()
    with changed_source(PACKAGE, tmp_path / "sm90"):
        assert outcome(run) == NOTHING


def test_a_first_product_may_not_come_early() -> None:
    """``routed_before`` on the product right after the routing is reported."""
    devices.cutlass_or_skip()
    with (
        devices.emulated(STANDARD[0], "sm_90") as device,
        pytest.raises(MissingDependencyWait, match=r"griddepcontrol\.wait before the read"),
    ):
        chain_sm90.product_after_routing(device, replace(chain_sm90.FIRST, routed_before=True))
