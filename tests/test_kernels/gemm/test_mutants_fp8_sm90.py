"""Mutants of the FP8 GEMM of sm_90: each mutant is reported, or its results are wrong."""

from dataclasses import dataclass, replace
from functools import partial

import pytest

from nvfp4_kernels.gemm.sm90.tile import EpilogueConfig, Tile
from tests.devices import KernelDevice
from tests.mutants import ANYTHING, WRONG, Mutant
from tests.mutants.kernels import Room, check_caught, check_nothing_to_catch
from tests.test_kernels.gemm.test_tiles_fp8_sm90 import E4M3, OUTPUT, check

KERNEL = Room("nvfp4_kernels.gemm.sm90")
SM90 = {"arch": "sm_90", "takes_device": True}


@dataclass(frozen=True)
class Product:
    """A tile, and a product of ``size`` tokens, rows and K on ``sms`` SMs."""

    tile: Tile
    size: tuple[int, int, int]
    output: EpilogueConfig = OUTPUT
    sms: int = 1

    def check(self, device: KernelDevice) -> None:
        check(device, self.tile, self.output, self.size, self.sms)


BOXES = replace(E4M3, boxes=True)
MANY = Product(Tile(64, max_stages=2), (70, 136, 448), replace(OUTPUT, boxes=True))
MANY_E4M3 = Product(Tile(64, max_stages=2), (70, 136, 192), BOXES)
FEW_E4M3 = Product(Tile(8, max_stages=2), (5, 136, 320), E4M3)
PAIR = Product(Tile(16, 2, max_stages=2), (9, 136, 320))
APART = Product(Tile(128, 2, max_stages=2, weight_per_warpgroup=True), (150, 72, 192), BOXES)
SLICED = Product(Tile(8, warpgroups=2, slices=2, max_stages=4), (5, 72, 1408), sms=132)
PRODUCTS = {
    "64": MANY,
    "64, E4M3": MANY_E4M3,
    "8, E4M3": FEW_E4M3,
    "16, pair": PAIR,
    "128, pair apart, E4M3": APART,
    "8, sliced": SLICED,
}


def edited(module: str, right: str, wrong: str, caught: str = WRONG, on: Product = MANY) -> Mutant:
    return Mutant(KERNEL.edited(module, right, wrong), caught, on)


MUTANTS = {
    # Decoding of weights.
    "1.5 times a scale a step too large": edited("folded", "_STEP = 4", "_STEP = 5"),
    "flags ignored": edited("folded", "flags = word >> 7 &", "flags = word >> 32 &"),
    "six for four": edited("folded", "0x08, 0x10", "0x08, 0x18"),
    "halves of a K tile swapped": edited(
        "folded", "(half * 4 * LANES + place)", "((1 - half) * 4 * LANES + place)"
    ),
    "scales of upper and lower rows swapped": edited(
        "folded", "2 * half + row) for row", "2 * half + 1 - row) for row"
    ),
    "steps of a half swapped": edited("folded", "[2 * step + row]", "[2 * (1 - step) + row]"),
    "rows and K mixed": edited(
        "folded", "upper[0], lower[0], upper[1], lower[1]", "upper[0], upper[1], lower[0], lower[1]"
    ),
    "no signs of the first four": edited("folded", "| word & signs", "| Uint32(0)"),
    "signs of the first four for all": edited("folded", "word << 4 & signs", "word & signs"),
    "signs taken for selectors": edited("folded", "word & Uint32(_MAGNITUDES)", "word"),
    # Scaling.
    "gate's factors for up": edited("scaling", "Int32(product) * n", "Int32(0)", WRONG, PAIR),
    "no scale of the result": edited(
        "scaling", "value * inverse, Float32(0.0)", "value, Float32(0.0)", WRONG, MANY_E4M3
    ),
    # E4M3 results.
    "halves of a pair of lanes swapped": edited(
        "store_fp8", "Uint32(0x3276), Uint32(0x5410)", "Uint32(0x5410), Uint32(0x3276)", WRONG,
        MANY_E4M3,
    ),
    "tokens of a pair of lanes swapped": edited(
        "store_fp8", "lane % 4 * 2 + odd", "lane % 4 * 2 + 1 - odd", WRONG, MANY_E4M3
    ),
    "one warp's words for all": edited("store_fp8", "+ warp * 4", "", ANYTHING, MANY_E4M3),
    "elements in their own order": edited(
        "store_fp8", "return column - inside + element % 8 // 2 * 16 + block * 4 + element % 2 * 2",
        "return column - inside + block * 16 + element - element // 8 + 0", WRONG, FEW_E4M3,
    ),
    "boxes among sums that others read": edited(
        "epilogue", "scratch.subview(group * elements)",
        "scratch.subview(group * (SLOTS * box * TILE))", "DataRace", APART,
    ),
    # Slices with wgmma.
    "a slice releases the other's stage": edited(
        "mma", "self._release(ring, count - tile.slices)", "self._release(ring, count - 1)",
        ANYTHING, SLICED,
    ),
    "a ring without a second stage for each slice": edited(
        "kernel", "return self.tile.depth(self.output.shared_bytes(self.tile))\n", "return 2\n",
        ANYTHING, SLICED,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_caught(name: str) -> None:
    check_caught(MUTANTS[name], partial(_check, MUTANTS[name].on), **SM90)


@pytest.mark.parametrize("given", PRODUCTS.values(), ids=PRODUCTS)
def test_nothing_to_catch(given: Product) -> None:
    check_nothing_to_catch(partial(_check, given), KERNEL.edited(), **SM90)


def _check(given: Product, device: KernelDevice) -> None:
    given.check(device)
