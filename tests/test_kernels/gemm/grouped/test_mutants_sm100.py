"""Mutants of grouped GEMM on sm_100: each mutant is reported, or its results are wrong."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from nvfp4_kernels import grouped_gemm, grouped_silu_mul_gemm
from nvfp4_kernels.activation import Activation
from tests.mutants import ANYTHING, WRONG, Mutant
from tests.mutants.kernels import Room, check_caught, check_nothing_to_catch, nothing
from tests.test_kernels.gemm.grouped.families import TileCase, swapped, use
from tests.test_kernels.gemm.grouped.tiles import Case, check_exact, check_quantized

KERNEL = Room("nvfp4_kernels.gemm.sm100")

# Bounds that many gates and some ups reach: otherwise swapping gate and up changes nothing.
CLAMPED = Activation("silu", limit=128.0)
PAIR = TileCase(
    swapped(8, max_stages=2),
    Case((3, 0, 17), 8, 144, 544, 2, row_scale=True, activation=CLAMPED),
    1,
)
SPLIT = TileCase(swapped(8, 2, max_stages=2), Case((3, 0, 17), 8, 144, 1056, 2), 4)
DOWN = TileCase(swapped(8, max_stages=2), Case((3, 0, 17), 8, 144, 544), 2)
BIASED = TileCase(swapped(8), Case((3, 0, 1), 8, 144, 96, 2, bias=torch.bfloat16), 1)


def next_expert(coord: Any) -> Any:
    """Mutant: take the weights and factors of the expert before the tile's expert."""
    return replace(coord, weight=coord.weight - 1)


def gate_for_both(given: Any) -> Any:
    """Mutant: load the gate projection's weights for the up projection, too."""

    def matrix(self: Any, operand: Any, coord: Any, state: Any, of_weights: bool) -> Any:
        operand = replace(operand, index=0) if of_weights else operand
        return given(self, operand, coord, state, of_weights)

    return matrix


def other_alphas(given: Any) -> Any:
    """Mutant: swap the alphas of gate and up."""

    def scaling(self: Any, *rest: Any) -> Any:
        row = given(self, *rest)
        return type(row)(row.scales[::-1], row.biases)

    return scaling


def first_experts_alphas(operands: Any, result: Any, row: Any, coord: Any) -> tuple[Any, ...]:
    """Mutant: use the first expert's factors for all experts."""
    return operands, result, row, replace(coord, weight=0)


def one_tile_more(given: Any) -> Any:
    """Mutant: count one token tile too many."""

    def counted(tile: Any, state: Any) -> Any:
        found = given(tile, state)
        raster = state.raster
        more = raster.across_m * raster.across_n
        return replace(found, num_tiles=found.num_tiles + more)

    return counted


def one_scale(given: Any) -> Any:
    """Mutant: quantise all tiles with the first expert's global scale."""

    def put(self: Any, result: Any, slots: Any, chunk: Any, *rest: Any) -> Any:
        return given(self, result, slots, replace(chunk, weight=0), *rest)

    return put


def longer(result: Any, row: Any, column: Any, coord: Any) -> tuple[Any, ...]:
    """Mutant: store rows beyond the rows of the tile."""
    return replace(result, m=result.m + 8), row, column + 1, coord


MUTANTS = {
    "the expert before": Mutant(KERNEL.with_result("loader", "tile_coord", next_expert), WRONG),
    "the same weights for gate and up": Mutant(
        KERNEL.swapped("loader:TmaLoader", "_matrix", gate_for_both), WRONG
    ),
    "the other one's alpha": Mutant(
        KERNEL.swapped("scaling:Scaling", "row_scaling", other_alphas), WRONG
    ),
    "the first expert's biases": Mutant(
        KERNEL.with_arguments("scaling:Scaling", "_biases", first_experts_alphas), WRONG, BIASED
    ),
    "the other one's bias": Mutant(
        KERNEL.with_result("scaling:Scaling", "_biases", lambda each: each[::-1]), WRONG, BIASED
    ),
    "the first expert's alphas": Mutant(
        KERNEL.with_arguments("scaling:Scaling", "row_scaling", first_experts_alphas), WRONG
    ),
    "the first expert's global scale": Mutant(
        KERNEL.swapped("store_nvfp4:Nvfp4Store", "put", one_scale), WRONG
    ),
    "a tile too many": Mutant(
        KERNEL.swapped("kernel", "resolve_tile_count", one_tile_more), ANYTHING
    ),
    "a tile too many, split": Mutant(
        KERNEL.swapped("kernel", "resolve_tile_count", one_tile_more), ANYTHING, SPLIT
    ),
    "scales of padding not written": Mutant(
        KERNEL.replaced("store_nvfp4:Nvfp4Store", "_pad", nothing), WRONG
    ),
    "rows stored beyond the tile": Mutant(
        KERNEL.with_arguments("store_columns:ColumnStore", "row", longer), ANYTHING, DOWN
    ),
}


def check(tile_case: TileCase) -> None:
    if tile_case.case.weights == 1:
        check_exact(grouped_gemm, tile_case.case)
        return
    check_exact(grouped_silu_mul_gemm, tile_case.case)
    check_quantized(grouped_silu_mul_gemm, tile_case.case)


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_caught(mutant: Mutant) -> None:
    on = mutant.on or PAIR
    check_caught(mutant, partial(check, on), partial(use, on))


@pytest.mark.parametrize(
    "tile_case", [PAIR, SPLIT, DOWN, BIASED], ids=["pair", "split", "down", "bias"]
)
def test_nothing_to_catch(tile_case: TileCase) -> None:
    check_nothing_to_catch(partial(check, tile_case), partial(use, tile_case))
