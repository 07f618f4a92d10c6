"""Mutants of the terms of activations, in products and in their results."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from nvfp4_kernels import Static, gemm, silu_mul_gemm
from nvfp4_kernels.formats.terms import TermLayout
from nvfp4_kernels.gemm.sm100.tile import Tile
from nvfp4_kernels.quantize import reference
from nvfp4_kernels.quantize.call import QuantizeCall
from tests.mutants import ANYTHING, Mutant
from tests.mutants.kernels import Room, check_caught, check_nothing_to_catch
from tests.test_kernels.gemm.linear_cases import Case, check_exact
from tests.test_kernels.gemm.silu_mul import test_silu_mul_gemm
from tests.test_kernels.gemm.test_tiles_sm100 import GEMM, PAIRS, TileCase, pair_case, use

KERNEL = Room("nvfp4_kernels.gemm.sm100")
BLOCK = Room("nvfp4_kernels.device")

FEW = TileCase(  # scales of all terms in one atom
    Tile(8, swap_ab=True, max_stages=2, terms=TermLayout(3, packed=True)),
    Case(5, 700, 576, terms=3),
    1,
)
SOME = TileCase(
    Tile(64, swap_ab=True, max_stages=2, terms=TermLayout(2)), Case(100, 400, 832, terms=2), 1
)
MANY = TileCase(
    Tile(128, two_cta=True, cluster_m=2, max_stages=2, terms=TermLayout(2)),
    Case(300, 520, 832, terms=2),
    2,
)
PRODUCTS = {"few": FEW, "some": SOME, "many": MANY}


def product(on: TileCase) -> Callable[[], None]:
    return partial(check_exact, gemm, on.case)


def first_term_twice(self: Any) -> list[tuple[int, int]]:
    """Mutant: multiply every weight with the first term again instead of the last."""
    tile = self.tile
    weights, terms = range(tile.weights), range(tile.terms.count)
    pairs = [(weight, term) for term in terms for weight in weights]
    if tile.swap_ab:
        pairs = [(weight, term) for weight in weights for term in terms]
    return [(weight, 0 if term == tile.terms.count - 1 else term) for weight, term in pairs]


def first_matrix(self: Any, operand: Any, coord: Any, state: Any, of_weights: bool) -> Any:
    """Mutant: load the first term for all terms."""
    if of_weights:
        return coord.batch * state.weight_batch_stride
    return coord.batch * self.tile.terms.count


def other_scales(found: Any, *rest: Any) -> tuple[Any, ...]:
    """Mutant: copy the scales of the M side's first two operands, both terms, in swapped order."""
    return ([found[1], found[0], *found[2:]], *rest)


ALWAYS_NEW = KERNEL.with_arguments("mma:Mma", "_multiply", lambda *args: (*args[:-1], False))
MUTANTS = {
    "a term twice, few": Mutant(KERNEL.replaced("mma:Mma", "_products", first_term_twice), on=FEW),
    "a term twice, some": Mutant(
        KERNEL.replaced("mma:Mma", "_products", first_term_twice), on=SOME
    ),
    "a term twice, many": Mutant(
        KERNEL.replaced("mma:Mma", "_products", first_term_twice), on=MANY
    ),
    "the first term loaded for all, few": Mutant(
        KERNEL.replaced("loader:TmaLoader", "_matrix", first_matrix), on=FEW
    ),
    "the first term loaded for all, many": Mutant(
        KERNEL.replaced("loader:TmaLoader", "_matrix", first_matrix), on=MANY
    ),
    "terms with each other's scales": Mutant(
        KERNEL.with_arguments("mma:Mma", "_copy_scales", other_scales), on=MANY
    ),
    "each step begins anew": Mutant(ALWAYS_NEW, on=FEW),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_products(name: str) -> None:
    mutant = MUTANTS[name]
    check_caught(mutant, product(mutant.on), partial(use, mutant.on))


@pytest.mark.parametrize("name", PRODUCTS)
def test_nothing_to_catch(name: str) -> None:
    on = PRODUCTS[name]
    assert on.rounds.enough, on.rounds
    check_nothing_to_catch(product(on), partial(use, on))


# One tile with terms for every family; the terms of a pair multiply gate and up projections.
SMALLER = TileCase(  # smaller than the family's, whose six schedules take half a minute
    Tile(128, two_cta=True, cluster_m=4, cluster_n=2, scale_sets=2, terms=TermLayout(2)),
    Case(1100, 260, 576, terms=2),
    8,
)
EVERY_FAMILY = {
    each.of_terms: each
    for each in (*GEMM.values(), *PAIRS.values(), SMALLER)
    if each.tile.terms.count > 1
}


def test_the_smaller_one_goes_round() -> None:
    assert SMALLER.of_terms in EVERY_FAMILY
    assert SMALLER.rounds.enough, SMALLER.rounds


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_every_schedule(family: str) -> None:
    on = EVERY_FAMILY[family]
    check = product(on)
    if on.tile.weights == 2:
        check = partial(test_silu_mul_gemm.check_exact, silu_mul_gemm, pair_case(on.case))
    check_nothing_to_catch(check, partial(use, on))


# --- results in terms -------------------------------------------------------------------------

SWAPPED = TileCase(Tile(16, 2, swap_ab=True, max_stages=2), Case(9, 208, 544), 1)
ROWS = TileCase(Tile(64, 2, max_stages=2), Case(140, 208, 544), 1)


def results(on: TileCase) -> Callable[[], None]:
    """Check that results in three terms are the float32 results, quantised."""

    def check() -> None:
        args = dict(test_silu_mul_gemm.make_problem(pair_case(on.case), grid=True).args)
        args["out_dtype"] = torch.float32
        full = silu_mul_gemm(**args)
        del args["out_dtype"]
        scale = full.abs().amax() / 2688
        found = silu_mul_gemm(**args, output=Static(scale, 3))
        expected = reference.quantize(QuantizeCall(full, Static(scale, 3)))
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))

    return check


def of_another(values: Any, block: Any) -> Any:
    """Mutant: return the block's values instead of the residual."""
    return values


def another_row(self: Any, result: Any, batch: Any, term: int, row: Any) -> Any:
    """Mutant: store codes of later terms one row further."""
    return (batch * self.output.terms.count + term) * result.m + (row + term) % result.m


RESULT_MUTANTS = {
    "the residual is the value": BLOCK.replaced("nvfp4_block", "_left", of_another),
    "codes of later terms a row further": KERNEL.replaced(
        "store_nvfp4:Nvfp4Store", "_data_row", another_row
    ),
    "scales of all terms in the first one's place": KERNEL.with_arguments(
        "store_nvfp4:Nvfp4Store",
        "_scale_offset",
        lambda result, batch, term, *rest: (result, batch, 0, *rest),
    ),
}


@pytest.mark.parametrize("on", [SWAPPED, ROWS], ids=["swapped", "rows"])
@pytest.mark.parametrize("name", RESULT_MUTANTS)
def test_results(name: str, on: TileCase) -> None:
    mutant = Mutant(RESULT_MUTANTS[name], ANYTHING)
    check_caught(mutant, results(on), partial(use, on))
