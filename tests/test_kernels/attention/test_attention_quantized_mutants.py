"""Mutants of quantisation in attention and its merge: each mutant's results are wrong."""

from functools import partial
from typing import Any

import pytest

from nvfp4_kernels.attention.sm100.tile import AttentionTile
from tests.emulator import EAGER
from tests.mutants import ANYTHING, WRONG, Mutant
from tests.mutants.kernels import Room, check_caught, check_nothing_to_catch, nothing, without
from tests.test_kernels.attention.attention_cases import Case
from tests.test_kernels.attention.attention_sm100 import Chosen
from tests.test_kernels.attention.test_attention_quantized import check

KERNEL, MERGE = Room("nvfp4_kernels.attention.sm100"), Room("nvfp4_kernels.attention.merge")
QUANTIZER = "quantized_rows:RowQuantizer"
ROWS = Chosen(AttentionTile(32))  # heads that begin in the middle of an atom
WARP_SPLIT = Chosen(AttentionTile(32, warp_split_kv=True))
SPLITS = Chosen(AttentionTile(32), 2)


def not_rounded(*arguments: Any) -> Any:
    """Mutant: quantise the float32 values without the rounding to the queries' dtype."""
    from cutlass import Float32, Vector

    from nvfp4_kernels.device import nvfp4_block

    values, scale = arguments[-2:]
    exact = Vector.from_elements(tuple(values), Float32)
    return nvfp4_block.quantize(exact, nvfp4_block.amax(exact), scale)


MUTANTS = {
    "float32 values are quantised": Mutant(KERNEL.replaced(QUANTIZER, "block", not_rounded), WRONG),
    "scales of the next pair": Mutant(
        KERNEL.with_result(QUANTIZER, "first_pair", lambda pair: pair + 1), WRONG
    ),
    "rows from the first one on": Mutant(
        KERNEL.with_arguments(QUANTIZER, "first_pair", lambda first, *rest: (first * 0, *rest)),
        WRONG,
    ),
    "dead rows store their scales": Mutant(
        KERNEL.with_arguments(QUANTIZER, "store_scales", lambda *a: (*a[:-1], a[1] > -1)), ANYTHING
    ),
    "staged rows are not waited for": Mutant(without("bar_warp_sync"), "DataRace"),
    "warp split: the wrong block": Mutant(
        KERNEL.with_arguments(
            QUANTIZER, "store_scale", lambda s, pair, block, *rest: (s, pair, block ^ 1, *rest)
        ),
        WRONG,
        WARP_SPLIT,
    ),
    "warp split: warps do not sync": Mutant(
        KERNEL.replaced("epilogue_warp_split:WarpSplitEpilogue", "_sync", nothing),
        ANYTHING,
        WARP_SPLIT,
    ),
    "merge: scales of the next row": Mutant(
        MERGE.with_arguments("merge", "scale_offset", lambda row, *rest: (row + 1, *rest)),
        ANYTHING,
        SPLITS,
    ),
    "merge: blocks of half the columns": Mutant(
        MERGE.with_result("merge", "amax", lambda largest: largest * 0.5), WRONG, SPLITS
    ),
}


def check_tile(chosen: Chosen) -> None:
    queries = (9, 2) if chosen.tile.warp_split_kv else (20, 2)
    keys = (140, 300) if chosen.splits > 1 else (40, 9)
    check(Case(queries, keys, 6, 2, head_dim=32).problem().paged(), first_row=120)


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_caught(mutant: Mutant) -> None:
    on = mutant.on or ROWS
    check_caught(mutant, partial(check_tile, on), on.use)


@pytest.mark.parametrize("chosen", [ROWS, WARP_SPLIT, SPLITS], ids=["rows", "warp split", "splits"])
def test_nothing_to_catch(chosen: Chosen) -> None:
    check_nothing_to_catch(partial(check_tile, chosen), chosen.use, schedules=[EAGER])
