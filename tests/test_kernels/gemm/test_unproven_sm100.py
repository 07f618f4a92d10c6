"""Forms of MMAs that no kernel known to run on silicon uses: the tiles that rely on them."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from nvfp4_kernels.gemm.sm100.tile import Tile
from nvfp4_kernels.tool.forced_product_case import ForcedProductCase
from tests import devices
from tests.emulator import EAGER
from tests.emulator.findings import UnprovenForm
from tests.emulator.machine.gpu import Gpu
from tests.test_kernels.tool.test_check import StandIn

COLUMNS, COLLECTORS = "strict_scale_columns", "strict_collectors"
# Tile, tokens, terms, and the modes in which the tile is reported.
TILES = {
    "8 tokens": (Tile(8, swap_ab=True), 8, 1, set()),
    "8 tokens, split K": (Tile(8, swap_ab=True, split_k=2), 8, 1, set()),
    "8 tokens, two terms": (Tile(8, swap_ab=True), 8, 2, {COLUMNS, COLLECTORS}),
    "32 tokens, three terms": (Tile(32, swap_ab=True), 32, 3, {COLUMNS, COLLECTORS}),
    "the same without collectors": (
        Tile(32, swap_ab=True, collects=False), 32, 3, {COLUMNS},
    ),
    "64 tokens, two terms": (Tile(64, swap_ab=True), 64, 2, {COLLECTORS}),
    "tiles of 32 for 96 tokens": (Tile(32, swap_ab=True), 96, 1, {COLUMNS}),
    "96 columns": (Tile(96), 200, 1, {COLUMNS}),
    "128 columns": (Tile(128), 200, 1, set()),
    "pairs of CTAs": (Tile(128, two_cta=True, cluster_m=2), 300, 1, set()),
}  # fmt: skip


@contextmanager
def strict(mode: str) -> Iterator[Gpu]:
    devices.cutlass_or_skip()
    with devices.emulated_ops(EAGER) as gpu, pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, mode, True)
        yield gpu


@pytest.mark.parametrize("mode", [COLUMNS, COLLECTORS])
@pytest.mark.parametrize(("tile", "tokens", "terms", "modes"), TILES.values(), ids=TILES)
def test_tiles_that_rely_on_unproven_forms(
    tile: Tile, tokens: int, terms: int, modes: set[str], mode: str
) -> None:
    case = ForcedProductCase("strict", (tile,), tokens, 136, 512, launches=1, terms=terms)
    with strict(mode):
        if mode in modes:
            with pytest.raises(UnprovenForm):
                case.run(StandIn(torch.device("cpu")))
        else:
            assert case.run(StandIn(torch.device("cpu")))["values"]
