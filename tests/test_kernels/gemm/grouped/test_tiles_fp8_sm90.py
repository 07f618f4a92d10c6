"""Every kind of sm_90 tile in grouped GEMMs of E4M3 tokens, bit for bit; spare tiles are poisoned.

Each case has a scale for each token, and rows and K that are ragged where a tile allows it; on one
SM a CTA has several tiles, and the ring goes round.
"""

from dataclasses import dataclass, replace

import pytest
import torch

from nvfp4_kernels.gemm.sm90.choose_fp8 import choose_grouped_config
from nvfp4_kernels.gemm.sm90.choose_grouped import GroupedProblem
from nvfp4_kernels.gemm.sm90.tile import EpilogueConfig, Tile
from nvfp4_kernels.moe.routing import TILE_TOKENS
from tests.devices import KernelDevice
from tests.test_kernels.gemm.grouped.cases_fp8 import Operands, check, grid_operands, stored
from tests.test_kernels.rounds import gemm_sm90
from tests.test_kernels.routing_cases import RoutingCase

pytestmark = pytest.mark.arch("sm_90")

BF16, FP32 = torch.bfloat16, torch.float32
# Experts without tokens, with one tile and with several; fewer tiles than the capacity.
FEW = RoutingCase(22, 2, 5, 8, ids="hostile")
MANY = RoutingCase(60, 4, 4, 64, ids="hostile")
WIDE = RoutingCase(70, 4, 3, 128)
WIDEST = RoutingCase(90, 4, 4, 256, ids="hostile")


@dataclass(frozen=True)
class TileCase:
    """A product on a given tile.

    Attributes:
        tile: tile, whose ``grouped`` and ``fp8`` are set by ``full_tile``.
        routing: batch.
        n, k: rows of a weight, and elements per row.
        boxes: whether TMA stores the result.
        fp8: whether the result is E4M3.
        bias: dtype of the bias; None: no bias.
    """

    tile: Tile
    routing: RoutingCase
    n: int
    k: int
    boxes: bool = False
    fp8: bool = False
    bias: torch.dtype | None = None

    def full_tile(self, early: bool = False) -> Tile:
        """The tile; ``early``: whether the routing was complete before the preceding launch."""
        return replace(self.tile, grouped=True, fp8=True, routed_before=early)

    def operands(self) -> Operands:
        return grid_operands(
            self.routing, self.n, self.k, gated=self.tile.weights == 2, fp8=self.fp8, bias=self.bias
        )


FAMILIES = {
    "few tokens": TileCase(Tile(8, warpgroups=1, max_stages=2), FEW, 136, 320),
    "few tokens, E4M3": TileCase(Tile(8, warpgroups=1, max_stages=2), FEW, 136, 192, fp8=True),
    "gate and up": TileCase(
        Tile(16, 2, k_tiles=2, max_stages=2), RoutingCase(30, 2, 4, 16, ids="hostile"), 136, 512
    ),
    "gate and up, E4M3": TileCase(
        Tile(32, 2, warpgroups=1, max_stages=2), RoutingCase(40, 2, 4, 32), 77, 192, fp8=True
    ),
    "boxes": TileCase(Tile(64, max_stages=2), MANY, 136, 320, boxes=True),
    "boxes, E4M3": TileCase(Tile(64, max_stages=2), MANY, 77, 192, boxes=True, fp8=True),
    "gate and up, boxes, E4M3": TileCase(
        Tile(64, 2, max_stages=2), MANY, 72, 320, boxes=True, fp8=True
    ),
    "gate and up, apart": TileCase(
        Tile(128, 2, weight_per_warpgroup=True, max_stages=2), WIDE, 72, 192, boxes=True
    ),
    "gate and up, apart, E4M3": TileCase(
        Tile(128, 2, weight_per_warpgroup=True, max_stages=2), WIDE, 136, 192, boxes=True, fp8=True
    ),
    "split": TileCase(Tile(8, warpgroups=1, split_k=8, max_stages=2), FEW, 72, 2048),
    "split, E4M3": TileCase(
        Tile(8, 2, warpgroups=1, split_k=2, max_stages=2), FEW, 72, 704, fp8=True
    ),
}
OTHERS = {
    "8, two warpgroups, two K tiles": TileCase(Tile(8, k_tiles=2), FEW, 136, 512, fp8=True),
    "8, gate and up, three CTAs": TileCase(Tile(8, 2, warpgroups=1, ctas_per_sm=3), FEW, 96, 64),
    "8, gate and up, bias, E4M3": TileCase(Tile(8, 2), FEW, 77, 192, fp8=True, bias=BF16),
    "16": TileCase(Tile(16), RoutingCase(30, 2, 4, 16), 72, 192, fp8=True),
    "32": TileCase(Tile(32), RoutingCase(40, 2, 4, 32), 77, 2880),
    "64, bias, E4M3": TileCase(Tile(64), MANY, 77, 64, boxes=True, fp8=True, bias=FP32),
    "128": TileCase(Tile(128), WIDE, 200, 192, boxes=True),
    "128, element by element, E4M3": TileCase(Tile(128), WIDE, 77, 64, fp8=True),
    "128, gate and up": TileCase(Tile(128, 2), WIDE, 72, 64, boxes=True),
    "128, gate and up, E4M3": TileCase(Tile(128, 2), WIDE, 72, 192, boxes=True, fp8=True),
    "256": TileCase(Tile(256), WIDEST, 72, 192, boxes=True),
    "256, E4M3": TileCase(Tile(256), WIDEST, 72, 64, boxes=True, fp8=True),
    "256, gate and up, E4M3": TileCase(
        Tile(256, 2, weight_per_warpgroup=True), WIDEST, 72, 192, boxes=True, fp8=True
    ),
}
EVERY = FAMILIES | OTHERS


def put_to_the_test(device: KernelDevice, name: str, sms: int, early: bool = False) -> None:
    given = EVERY[name]
    operands = given.operands()
    assert 0 < operands.used < len(operands.call.a)
    check(device, given.full_tile(early), stored(given.tile, operands, given.boxes), operands, sms)


@pytest.mark.parametrize("name", [name for name, c in FAMILIES.items() if c.tile.parts == 1])
def test_each_persistent_family_goes_round(name: str) -> None:
    """Each persistent family's case wraps around its ring and its accumulators on one SM."""
    given = FAMILIES[name]
    operands, tile = given.operands(), given.full_tile()
    output = stored(tile, operands, given.boxes)
    assert gemm_sm90(tile, output, operands.used * tile.tokens, given.n, given.k, sms=1).enough


@pytest.mark.parametrize("name", FAMILIES)
def test_family(name: str, device: KernelDevice) -> None:
    put_to_the_test(device, name, sms=1)


@pytest.mark.schedules("random 1")
@pytest.mark.parametrize("name", EVERY)
def test_loads_weights_before_it_waits(name: str, device: KernelDevice) -> None:
    put_to_the_test(device, name, sms=132, early=True)


@pytest.mark.schedules("random 1")
@pytest.mark.parametrize("early", [False, True], ids=["after the wait", "before the wait"])
@pytest.mark.parametrize("name", ["few tokens, E4M3", "split, E4M3", "gate and up, apart, E4M3"])
def test_no_tile_in_use(name: str, early: bool, device: KernelDevice) -> None:
    """Kernels read and write nothing if no tile is in use."""
    given = FAMILIES[name]
    given = replace(given, routing=replace(given.routing, ids="none"))
    operands = given.operands()
    assert operands.used == 0 < len(operands.call.a)
    output = stored(given.tile, operands, given.boxes)
    check(device, given.full_tile(early), output, operands, sms=132)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float32"])
@pytest.mark.parametrize("weights", [1, 2])
@pytest.mark.parametrize("tokens", TILE_TOKENS)
def test_every_tile_has_a_configuration(tokens: int, weights: int, dtype: str) -> None:
    """The chooser finds a tile whose ring fits, for N and K of any size."""
    output = EpilogueConfig("float8_e4m3fn", dtype, per_token=True)  # type: ignore[arg-type]
    for n, k in ((16, 64), (77, 192), (1408, 2880 + 64), (2880, 2944), (4096, 7168)):
        for tiles in (1, 40, 2000):
            problem = GroupedProblem(tiles, tokens, 32, n, k, weights)
            tile, chosen = choose_grouped_config(problem, output, 132)
            assert tile.tokens == tokens
            assert tile.grouped
            assert tile.fp8
            assert tile.depth(chosen.shared_bytes(tile)) >= tile.least_stages
            assert tile.k_tiles == 1 or k % (128 * tile.k_tiles) == 0
