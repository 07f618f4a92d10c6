"""Mutants of grouped GEMM of E4M3 tokens: each mutant is reported, or its results are wrong."""

from collections.abc import Callable

import pytest

from tests.devices import KernelDevice
from tests.mutants import ANYTHING, WRONG, Mutant
from tests.mutants.kernels import Room, check_caught, check_nothing_to_catch
from tests.test_kernels.gemm.grouped.test_tiles_fp8_sm90 import put_to_the_test

KERNEL = Room("nvfp4_kernels.gemm.sm90")
SM90 = {"arch": "sm_90", "takes_device": True}
Run = Callable[[KernelDevice], None]


def family(name: str) -> Run:
    return lambda device: put_to_the_test(device, name, 1)


FEW = family("few tokens, E4M3")
PAIR = family("gate and up, E4M3")
BOXES = family("boxes, E4M3")
PAIR_BOXES = family("gate and up, boxes, E4M3")
APART = family("gate and up, apart, E4M3")
# Weights are padded with zeros: only a bias shows padding that is not.
BIAS, BIAS_BOXES = family("8, gate and up, bias, E4M3"), family("64, bias, E4M3")


def edited(module: str, right: str, wrong: str, caught: str, on: Run = FEW) -> Mutant:
    return Mutant(KERNEL.edited(module, right, wrong), caught, on)


MUTANTS = {
    "factors of the first expert": edited(
        "scaling", "return matrix(self.tile, coord, product) * n", "return product * n", WRONG
    ),
    "factors of gate for up": edited(
        "scaling",
        "return matrix(self.tile, coord, product) * n",
        "return matrix(self.tile, coord, 0) * n",
        WRONG,
        PAIR,
    ),
    "factors of whole groups apart": edited(
        "scaling",
        "return matrix(self.tile, coord, product) * n",
        "return matrix(self.tile, coord, product) * ((n + 63) // 64 * 64)",
        "OutOfBounds",
        PAIR,
    ),
    "the result's scale of the first expert": edited(
        "scaling",
        "coord.expert if self.tile",
        "Int32(0) if self.tile",
        WRONG,
    ),
    "the result's scale of a tile": edited(
        "scaling",
        "coord.expert if self.tile",
        "coord.tokens if self.tile",
        "OutOfBounds",
    ),
    "scales of tokens left out": edited(
        "scaling", "values = [value * token for value in values]", "pass", WRONG
    ),
    "scales of tokens for the gate alone": edited(
        "scaling",
        "values = [value * token for value in values]",
        "values = [values[0] * token, *values[1:]]",
        WRONG,
        PAIR,
    ),
    "scales of another tile's tokens": edited(
        "scaling",
        "load(cutlass.min(token, m - 1))",
        "load(token % self.tile.tokens)",
        WRONG,
    ),
    "scales of tokens that are not in use": edited(
        "scaling", "load(cutlass.min(token, m - 1))", "load(m - 1)", "UninitialisedRead"
    ),
    "biases of the first expert": edited(
        "scaling",
        "dtype(bias.load(self._first(coord, w, n) + at))",
        "dtype(bias.load(w * n + at))",
        WRONG,
        BIAS,
    ),
    "padding is not zero": edited(
        "scaling",
        "row < n if self",
        "row >= 0 if self",
        WRONG,
        BIAS,
    ),
    "padding is not zero in boxes": edited(
        "scaling",
        "row < n if self",
        "row >= 0 if self",
        WRONG,
        BIAS_BOXES,
    ),
    "padding is not written": edited(
        "epilogue",
        "cute.ceil_div(result.n, GROUP) * GROUP if self.output.is_fp8 else result.n",
        "result.n",
        WRONG,
    ),
    "elements in their own order": edited("epilogue", "store_fp8.place(column)", "column", WRONG),
    "words of the other row": edited(
        "store_fp8", "lane % 4 * 2 + odd", "lane % 4 * 2 + 1 - odd", WRONG, BOXES
    ),
    "blocks of the other warps": edited(
        "store_fp8", "+ warp * 4", "+ (3 - warp) * 4", WRONG, BOXES
    ),
    "boxes in the peer's part of the exchange": edited(
        "epilogue", "group * elements", "group * (elements // 2)", "DataRace", APART
    ),
    "weights as far apart as fragments": edited(
        "loader", "cute.ceil_div(k, tile.tile_k) +", "cute.ceil_div(k, 64) +", ANYTHING, PAIR_BOXES
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_caught(name: str) -> None:
    check_caught(MUTANTS[name], MUTANTS[name].on, **SM90)


@pytest.mark.parametrize("run", [FEW, PAIR, BOXES, PAIR_BOXES, APART, BIAS, BIAS_BOXES])
def test_nothing_to_catch(run: Run) -> None:
    check_nothing_to_catch(run, KERNEL.edited(), **SM90)
