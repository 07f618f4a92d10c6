"""Every kind of sm_90 tile in grouped GEMMs, bit for bit; spare token tiles are poisoned."""

from dataclasses import replace

import pytest
import torch

from nvfp4_kernels.gemm.sm90.tile import EpilogueConfig, Tile
from nvfp4_kernels.sm90.limits import ActDtype
from tests.devices import KernelDevice
from tests.test_kernels.gemm.grouped.tiles_sm90 import check, grid_operands, stored
from tests.test_kernels.rounds import gemm_sm90
from tests.test_kernels.routing_cases import RoutingCase

pytestmark = pytest.mark.arch("sm_90")

# Experts without tokens, with one tile and with several; fewer tiles than the capacity.
FEW = RoutingCase(22, 2, 5, 8, ids="hostile")
MANY = RoutingCase(60, 4, 4, 64, ids="hostile")
WIDE = RoutingCase(70, 4, 3, 128)
WIDEST = RoutingCase(90, 4, 4, 256, ids="hostile")
# Tile, routing, rows and K of a weight, whether a TMA box store is used. Rows and K are ragged
# where a tile allows it; on one SM a CTA has several tiles, and the ring goes round.
FAMILIES = {
    "mma.sync": (Tile(8, warpgroups=1, max_stages=2), FEW, 136, 208, False),
    "mma.sync, gate and up": (
        Tile(16, 2, k_tiles=2, max_stages=2),
        RoutingCase(30, 2, 4, 16, ids="hostile"),
        136,
        256,
        False,
    ),
    "mma.sync, sliced": (
        Tile(32, warpgroups=2, slices=2, max_stages=2),
        RoutingCase(50, 2, 4, 32, ids="hostile"),
        72,
        320,
        False,
    ),
    "mma.sync, split": (Tile(8, warpgroups=1, split_k=8, max_stages=2), FEW, 72, 1024, False),
    "mma.sync, gate and up, sliced, split": (
        Tile(8, 2, warpgroups=2, slices=2, split_k=2, max_stages=2),
        FEW,
        72,
        400,
        False,
    ),
    "wgmma": (Tile(64, max_stages=2), MANY, 136, 208, True),
    "wgmma, element by element": (
        Tile(32, warpgroups=1, max_stages=2),
        RoutingCase(40, 2, 4, 32),
        77,
        144,
        False,
    ),
    "wgmma, gate and up": (Tile(64, 2, max_stages=2), MANY, 72, 208, True),
    "wgmma, gate and up, apart": (
        Tile(128, 2, weight_per_warpgroup=True, max_stages=2),
        WIDE,
        72,
        144,
        True,
    ),
    "wgmma, split": (Tile(64, split_k=2, max_stages=2), MANY, 72, 208, False),
}
OTHERS = {
    "8, two warpgroups, two K tiles": (Tile(8, k_tiles=2), FEW, 136, 256, False),
    "8, gate and up, three CTAs": (Tile(8, 2, warpgroups=1, ctas_per_sm=3), FEW, 96, 96, False),
    "16": (Tile(16), RoutingCase(30, 2, 4, 16), 72, 96, False),
    "32, gate and up": (Tile(32, 2), RoutingCase(40, 2, 4, 32), 72, 96, False),
    "128": (Tile(128), WIDE, 200, 144, True),
    "128, gate and up": (Tile(128, 2), WIDE, 72, 80, True),
    "128, element by element": (Tile(128), WIDE, 77, 80, False),
    "256": (Tile(256), WIDEST, 72, 96, True),
    "256, gate and up": (Tile(256, 2, weight_per_warpgroup=True), WIDEST, 72, 96, True),
}


def put_to_the_test(device: KernelDevice, name: str, sms: int, early: bool = False) -> None:
    tile, routing, n, k, boxes = (FAMILIES | OTHERS)[name]
    given = grid_operands(routing, n, k, gated=tile.weights == 2)
    assert 0 < given.used < len(given.a)
    check(device, grouped(tile, early), stored(tile, n, boxes), given, sms)


def grouped(tile: Tile, early: bool = False) -> Tile:
    return replace(tile, grouped=True, routed_before=early)


@pytest.mark.parametrize("name", [name for name, (tile, *_) in FAMILIES.items() if tile.parts == 1])
def test_each_persistent_family_goes_round(name: str) -> None:
    """Each persistent family's case wraps around its ring and its accumulators on one SM."""
    tile, routing, n, k, boxes = FAMILIES[name]
    used = grid_operands(routing, n, k, gated=tile.weights == 2).used
    assert gemm_sm90(tile, stored(tile, n, boxes), used * tile.tokens, n, k, sms=1).enough


@pytest.mark.parametrize("name", FAMILIES)
def test_family(name: str, device: KernelDevice) -> None:
    put_to_the_test(device, name, sms=1)


@pytest.mark.schedules("random 1")
@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
def test_loads_weights_before_it_waits(name: str, device: KernelDevice) -> None:
    put_to_the_test(device, name, sms=132, early=True)


NO_TOKENS = {
    name: FAMILIES[name]
    for name in ("mma.sync", "mma.sync, gate and up, sliced, split", "wgmma, gate and up, apart")
}


@pytest.mark.parametrize("early", [False, True], ids=["after the wait", "before the wait"])
@pytest.mark.parametrize("name", NO_TOKENS)
def test_no_tile_in_use(name: str, early: bool, device: KernelDevice) -> None:
    """Kernels read and write nothing if no tile is in use."""
    tile, routing, n, k, boxes = NO_TOKENS[name]
    given = grid_operands(replace(routing, ids="none"), n, k, gated=tile.weights == 2)
    assert given.used == 0 < len(given.a)
    check(device, grouped(tile, early), stored(tile, n, boxes), given, sms=132)


@pytest.mark.schedules("random 1")
@pytest.mark.parametrize("out", ["float16", "float32"])
def test_dtypes(out: ActDtype, device: KernelDevice) -> None:
    tile, output = Tile(8, warpgroups=1, grouped=True), EpilogueConfig("float16", out)
    given = grid_operands(FEW, 72, 80, gated=False, dtype=torch.float16)
    check(device, tile, output, given, sms=132)
