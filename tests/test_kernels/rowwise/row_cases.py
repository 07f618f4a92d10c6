"""Shapes of activations, and thread layouts, for kernels that read rows."""

from dataclasses import dataclass
from importlib import import_module

import pytest
import torch
from torch import Tensor

from nvfp4_kernels.device.row_vectors.tile import VectorTile
from nvfp4_kernels.device.rowwise.tile import RowTile
from tests.emulator import STANDARD

EVERY_SCHEDULE = pytest.mark.schedules(*(schedule.name for schedule in STANDARD))
# Kernels whose CTAs never synchronise: other schedules leave the same memory to the next
# launch.
TWO_SCHEDULES = pytest.mark.schedules("eager", "random 1")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Case:
    m: int
    k: int
    batch: tuple[int, ...] = ()
    dtype: torch.dtype = BF16

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.batch, self.m, self.k)

    def random(self) -> Tensor:
        return torch.randn(self.shape).to(self.dtype)

    def integers(self) -> Tensor:
        """Values within ±8, so that float32 sums of squares are exact in any order."""
        return torch.randint(-8, 9, self.shape).to(self.dtype)


CASES = {
    "one block": Case(1, 16),
    "no rows": Case(0, 64),
    "empty batch": Case(5, 48, batch=(0,)),
    "one row": Case(1, 1024),
    "ragged": Case(131, 80),
    "odd number of blocks": Case(5, 16 * 13),
    "several row tiles": Case(300, 192),
    "fp16": Case(33, 96, dtype=FP16),
    "fp32": Case(33, 112, dtype=FP32),
    "batch": Case(5, 48, batch=(3,)),
    "batch of batches": Case(130, 48, batch=(2, 2), dtype=FP32),
    "Llama 3 8B hidden": Case(3, 4096),
    "DeepSeek V3 hidden": Case(1, 7168, dtype=FP16),
}
EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)

# Tiles that no small problem gets by default: rows that share warps, several steps per thread,
# idle warps.
TILES = {
    "4 rows": RowTile(4, 8, 4),
    "2 rows": RowTile(2, 3, 2),
    "8 rows": RowTile(8, 5, 5),
    "16 warps": RowTile(1, 16, 3),
}
EVERY_TILE = pytest.mark.parametrize("tile", TILES.values(), ids=TILES)


def use_tile(patch: pytest.MonkeyPatch, room: str, tile: RowTile) -> None:
    """Make the sm_100 kernels of package ``room`` use ``tile`` for any problem."""
    module = import_module(f"nvfp4_kernels.{room}.sm100")
    patch.setattr(module, "choose_config", lambda *_: tile)


# The same for kernels of sm_90, whose CTA has one row or a part of one.
VECTOR_TILES = {
    "a warp": VectorTile(32, 1),
    "3 warps": VectorTile(96, 2),
    "4 steps": VectorTile(64, 4),
}
EVERY_VECTOR_TILE = pytest.mark.parametrize("tile", VECTOR_TILES.values(), ids=VECTOR_TILES)


def use_vector_tile(patch: pytest.MonkeyPatch, name: str, tile: VectorTile) -> None:
    """Make the kernels of module ``name``, of sm_90, use ``tile`` for any problem."""
    module = import_module(f"nvfp4_kernels.{name}")
    chooser = "choose_config" if hasattr(module, "choose_config") else "choose_fp8_config"
    patch.setattr(module, chooser, lambda *_: tile)
