"""Mutants of the block-scaled GEMM: each mutant is reported, or its results are wrong."""

from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nvfp4_kernels import Static, gemm, silu_mul_gemm
from nvfp4_kernels.gemm.sm100.tile import ATOMS_K, TILE_BYTES, Tile
from nvfp4_kernels.sm100.limits import ATOM_BYTES, CTA_ROWS
from tests.emulator import STANDARD
from tests.mutants import ANYTHING, WRONG, Mutant, Patch
from tests.mutants.kernels import (
    Room,
    changed,
    check_caught,
    check_dependency_wait,
    check_nothing_to_catch,
    compiled_anew,
    first_noticed,
    nothing,
    one_of,
    unwaited,
    used_in,
    without,
    without_in,
)
from tests.test_kernels import oracle
from tests.test_kernels.gemm import test_sm100
from tests.test_kernels.gemm.linear_cases import Case, grid_problem
from tests.test_kernels.gemm.silu_mul import test_silu_mul_gemm
from tests.test_kernels.gemm.test_tiles_sm100 import TileCase, pair_case, use

KERNEL = Room("nvfp4_kernels.gemm.sm100")

# Results are stored as TMA boxes.
PAIR = TileCase(Tile(64, 2, max_stages=2), Case(300, 80, 544, out_dtype=torch.bfloat16), 1)
SPLIT = TileCase(
    Tile(8, 2, swap_ab=True, split_k=2, max_stages=2), Case(7, 720, 544, row_scale=True), 2
)
SWAPPED = TileCase(
    Tile(64, 2, swap_ab=True, max_stages=2), Case(70, 400, 544, out_dtype=torch.bfloat16), 1
)
TWO_CTA = TileCase(Tile(128, 2, two_cta=True, cluster_m=2, max_stages=2), Case(600, 208, 544), 2)


def one_alpha(given: Any) -> Any:
    """Mutant: scale the up product by the gate's alpha."""

    def begin(self: Any, sums: Any, row: Any, *rest: Any) -> Any:
        return given(self, sums, type(row)([row.scales[0]] * 2, row.biases), *rest)

    return begin


def number_or_least(value: Any) -> Any:
    """Mutant: turn NaN into the least value."""
    import cutlass.cute as cute

    return cute.arch.fmax(value, -21.4)


def keep_another(self: Any, product: int) -> Any:
    """Mutant: keep activations in the collector where the second product takes its own."""
    from cutlass.experimental import primitives as ptx

    return ptx.Tcgen05MMACollectorOp.LASTUSE if product else None


def start_alone(self: Any, warp: int | None) -> None:
    """Mutant: start once this CTA's mbarriers are initialised, without waiting for the peers'."""
    from cutlass.experimental import primitives as ptx

    ptx.barrier_cta_sync()


def arrive_in_the_cta(patch: pytest.MonkeyPatch) -> None:
    """Mutant: arrive at peers' mbarriers with CTA scope."""
    from cutlass.experimental import primitives as ptx

    given = ptx.mbarrier_arrive

    def arrive(*args: Any, **named: Any) -> Any:
        return given(*args, **named | ({"scope": ptx.MemScope.CTA} if "scope" in named else {}))

    patch.setattr(ptx, "mbarrier_arrive", arrive)


def wait_in_the_cta(patch: pytest.MonkeyPatch) -> None:
    """Mutant: wait for peers' data with CTA scope."""
    split_k = import_module("nvfp4_kernels.gemm.sm100.split_k")
    patch.setattr(split_k, "CLUSTER", import_module("nvfp4_kernels.device.mbarrier").CTA)


def boxes_of_a_row_more(patch: pytest.MonkeyPatch) -> None:
    """Mutant: load one more row of each operand, and expect its bytes."""
    row_bytes, operands = 128, 3
    KERNEL.with_arguments("kernel", "data_map", lambda data, k, rows: (data, k, rows + 1))(patch)
    more = lambda barrier, nbytes: (barrier, nbytes + operands * row_bytes)  # noqa: E731
    changed("mbarrier_arrive_expect_tx", more)(patch)


def eight_rows_on(result: Any, slots: Any, *rest: Any) -> tuple[Any, ...]:
    """Mutant: use boxes eight rows further on, where the swizzle is the same."""
    return result, slots.subview(8 * 128 * 8 // slots.dtype.width), *rest


def twice_the_stage(place: int) -> Any:
    """Change of arguments: stage 1 of two, at ``place``, becomes stage 2, beyond the ring."""
    return lambda *args: (*args[:place], args[place] * 2, *args[place + 1 :])


DATA_BYTES, SCALE_BYTES = CTA_ROWS * TILE_BYTES, ATOMS_K * ATOM_BYTES  # the M side's operands


def twice_the_stage_of(nbytes: int) -> Any:
    """Change of ``Mma._stage``'s arguments for operands of ``nbytes``: a stage beyond the ring."""
    return lambda found, sizes, stage: (found, sizes, stage * 2 if sizes[0] == nbytes else stage)


GONE = Mutant(KERNEL.replaced("lifetime:Lifetime", "wait_end", nothing), ANYTHING)
NOT_WAITED = Mutant(KERNEL.replaced("mma:Mma", "_acquire_accumulator", nothing), "DataRace")
MUTANTS = {
    "scales of gate and up swapped": Mutant(
        KERNEL.with_arguments(
            "mma:Mma", "_copy_scales", lambda found, *rest: ([found[0], found[2], found[1]], *rest)
        ),
        WRONG,
    ),
    "accumulate left on": Mutant(
        KERNEL.with_arguments("mma:Mma", "_multiply", lambda *args: (*args[:-1], True)),
        "UninitialisedRead",
    ),
    "the gate's alpha for both": Mutant(
        KERNEL.swapped("scaling:Scaling", "begin", one_alpha), WRONG
    ),
    "activations used but not kept": Mutant(
        KERNEL.replaced("mma:Mma", "_collector", keep_another), "IllegalInstruction"
    ),
    "no scales copied": Mutant(without("tcgen05_cp"), "UninitialisedRead"),
    "bytes expected twice": Mutant(
        changed("mbarrier_arrive_expect_tx", lambda barrier, n: (barrier, 2 * n)), "Deadlock"
    ),
    "too few bytes expected": Mutant(
        changed("mbarrier_arrive_expect_tx", lambda barrier, n: (barrier, n - 2048)), ANYTHING
    ),
    "arrive count of empty": Mutant(
        KERNEL.with_result("barriers", "arrive_counts", lambda counts: replace(counts, empty=2)),
        "Deadlock",
    ),
    "no wait for the stored box": Mutant(
        without("cp_async_bulk_wait_group", lambda n, read: n > 0), "DataRace"
    ),
    "no proxy fence before a box leaves": Mutant(without("fence_proxy"), "MissingProxyFence"),
    "no wait for tcgen05.ld": Mutant(without("tcgen05_wait"), "UnwaitedLoad"),
    "no tcgen05 fence": Mutant(without("tcgen05_fence"), "MissingTensorFence"),
    "no fence of the barriers' initialisation": Mutant(
        without("fence_mbarrier_init"), "BarrierMisuse", TWO_CTA
    ),
    "no warp barrier": Mutant(without("bar_warp_sync"), "DataRace"),
    "tensor memory kept": Mutant(without("tcgen05_dealloc"), "TensorMemoryMisuse"),
    "parts of a split not announced": Mutant(
        without("mbarrier_arrive", lambda *a, **k: "scope" in k), "Deadlock", SPLIT
    ),
    "accumulators of a pair not released": Mutant(
        without("mbarrier_arrive", lambda *a, **k: "scope" in k), "Deadlock", TWO_CTA
    ),
    "fewer bytes of a split expected than arrive": Mutant(
        KERNEL.replaced("split_k:SplitK", "bytes_received", 64), ANYTHING, SPLIT
    ),
    "parts of a split not waited for": Mutant(
        KERNEL.replaced("split_k", "wait", nothing), ANYTHING, SPLIT
    ),
    "gone while a peer still signals": replace(GONE, on=TWO_CTA),
    "tensor memory freed while others read it": GONE,
    "tensor memory used before it is allocated": Mutant(
        KERNEL.replaced("lifetime:Lifetime", "allocated", nothing), ANYTHING
    ),
    "no fence of the barriers' initialisation, one CTA": Mutant(
        without("fence_proxy"), "MissingProxyFence"
    ),
    "a pair allocates before both have started": Mutant(
        KERNEL.replaced("lifetime:Lifetime", "start", start_alone), "UnstartedPeer", TWO_CTA
    ),
    "partial sums sent before the other CTA has started": Mutant(
        KERNEL.replaced("lifetime:Lifetime", "cluster_wait", nothing), ANYTHING, SPLIT
    ),
    "no fence of the initialisation of a split's barriers": Mutant(
        without("fence_mbarrier_init"), "BarrierMisuse", SPLIT
    ),
    "parts of a split released to CTAs that have gone": Mutant(
        KERNEL.with_arguments("split_k:SplitK", "release", lambda *args: (*args[:3], True)),
        "ExitedPeer",
        SPLIT,
    ),
    "SiLU of another one": Mutant(
        KERNEL.with_result("scaling", "silu", lambda values: values[::-1]), WRONG
    ),
    "parts of a split announced to the own CTA": Mutant(arrive_in_the_cta, ANYTHING, SPLIT),
    "parts of a split awaited from the own CTA": Mutant(wait_in_the_cta, ANYTHING, SPLIT),
    "accumulators are not waited for": NOT_WAITED,
    "accumulators are not waited for, split": replace(NOT_WAITED, caught=ANYTHING, on=SPLIT),
    "accumulators are not waited for, two SM": replace(NOT_WAITED, on=TWO_CTA),
    "the ring is not waited for": Mutant(
        KERNEL.replaced("loader", "wait", nothing), "BarrierMisuse"
    ),
    # Copies between shared arrays.
    "boxes of a row too many": Mutant(boxes_of_a_row_more, "ArrayOverrun"),
    "a stage loaded beyond the ring": Mutant(
        KERNEL.with_arguments("loader:TmaLoader", "_load_m", twice_the_stage(4)), "ArrayOverrun"
    ),
    "a stage of weights loaded beyond the ring": Mutant(
        KERNEL.with_arguments("loader:TmaLoader", "_load_n", twice_the_stage(4)),
        "ArrayOverrun",
        TWO_CTA,
    ),
    "a stage multiplied beyond the ring": Mutant(
        KERNEL.with_arguments("mma:Mma", "_stage", twice_the_stage_of(DATA_BYTES)), "ArrayOverrun"
    ),
    "a stage of scales copied beyond the ring": Mutant(
        KERNEL.with_arguments("mma:Mma", "_stage", twice_the_stage_of(SCALE_BYTES)), "ArrayOverrun"
    ),
    "boxes stored eight rows too far": Mutant(
        KERNEL.with_arguments("store:Store", "_boxes", eight_rows_on), "ArrayOverrun"
    ),
    "parts of a split a column too far": Mutant(
        KERNEL.with_result("split_k:SplitK", "_place", lambda offset: offset + CTA_ROWS),
        "ArrayOverrun",
        SPLIT,
    ),
    "the next columns not waited for": Mutant(without("tcgen05_wait"), "UnwaitedLoad", SWAPPED),
    "a swapped tile released after its first columns": Mutant(
        KERNEL.with_result("epilogue:Epilogue", "_last_shared", lambda last: 0), "DataRace", SWAPPED
    ),
    "a swapped tile never released": Mutant(
        KERNEL.with_result("epilogue:Epilogue", "_last_shared", lambda last: -1),
        "Deadlock",
        SWAPPED,
    ),
    "a token more than there are stored": Mutant(
        KERNEL.with_result(
            "store_columns:ColumnStore", "row", lambda row: replace(row, tokens=row.tokens + 1)
        ),
        ANYTHING,
        SWAPPED,
    ),
    "rows of weights beyond the last stored": Mutant(
        KERNEL.with_arguments(
            "store_columns:ColumnStore",
            "row",
            lambda result, row, *rest: (replace(result, n=result.n + 8), row, *rest),
        ),
        ANYTHING,
        SWAPPED,
    ),
    "tokens stored where the next ones belong": Mutant(
        KERNEL.with_arguments(
            "store_columns:ColumnStore", "put", lambda row, at, values: (row, at + 1, values)
        ),
        WRONG,
        SWAPPED,
    ),
    "values stored before those before them": Mutant(
        KERNEL.with_arguments(
            "store_columns:ColumnStore", "put", lambda row, at, values: (row, at ^ 8, values)
        ),
        WRONG,
        SWAPPED,
    ),
    "half of the weights for both CTAs": Mutant(
        KERNEL.replaced("loader:TmaLoader", "_n_row", lambda self, coord, state: coord.n * 128),
        WRONG,
        TWO_CTA,
    ),
}


def check(tile_case: TileCase) -> None:
    test_silu_mul_gemm.check_exact(silu_mul_gemm, pair_case(tile_case.case))


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_caught(mutant: Mutant) -> None:
    on = mutant.on or PAIR
    check_caught(mutant, partial(check, on), partial(use, on))


# NVFP4 results of a swapped tile are transposed in shared memory, 32 tokens at a time.
STORE = used_in("_transposed")
TRANSPOSED = {
    "before those before them are read": without("bar_warp_sync", one_of(2, 0, STORE)),
    "after they are read": without("bar_warp_sync", one_of(2, 1, STORE)),
}


def check_transposed() -> None:
    test_sm100.check_quantized(pair_case(SWAPPED.case), torch.device("cpu"))


@pytest.mark.parametrize("mutant", TRANSPOSED.values(), ids=TRANSPOSED)
def test_tokens_stored_to_be_transposed(mutant: Patch) -> None:
    caught = Mutant(mutant, "DataRace")
    check_caught(caught, check_transposed, partial(use, SWAPPED), schedules=STANDARD[:1])


def test_tokens_are_transposed_in_turn() -> None:
    check_nothing_to_catch(check_transposed, partial(use, SWAPPED), schedules=STANDARD[:1])


@pytest.mark.parametrize(
    "tile_case", [PAIR, SPLIT, TWO_CTA, SWAPPED], ids=["pair", "split", "two SM", "swapped"]
)
def test_nothing_to_catch(tile_case: TileCase) -> None:
    assert tile_case.rounds.enough, tile_case.rounds
    check_nothing_to_catch(partial(check, tile_case), partial(use, tile_case))


def test_reciprocals_of_the_other_two_of_four_are_noticed() -> None:
    """Swapped reciprocals are noticed with small gates; for large gates the factor is 1."""
    swapped = KERNEL.with_result("silu", "_reciprocals", lambda four: [*four[2:], *four[:2]])
    wide = partial(test_silu_mul_gemm.check_wide_gates, silu_mul_gemm, pair_case(SWAPPED.case))
    check_nothing_to_catch(wide, partial(use, SWAPPED), schedules=STANDARD[:1])
    check_caught(Mutant(swapped), wide, partial(use, SWAPPED), schedules=STANDARD[:1])


def test_nan_of_a_gate_held_as_its_denominator_is_noticed() -> None:
    held = KERNEL.with_result("silu", "_held_or_nan", number_or_least)
    nan = partial(test_silu_mul_gemm.check_nan, silu_mul_gemm)
    check_caught(Mutant(held), nan, partial(use, SWAPPED), schedules=STANDARD[:1])


def taller_last_group(given: Any) -> Any:
    """Mutant: the last raster group is one row of tiles too tall, so that a tile is left out."""

    def order(across_m: Any, *rest: Any) -> Any:
        import cutlass.cute as cute

        from nvfp4_kernels.gemm.sm100.scheduler import GROUP

        divisor = cute.FastDivmodDivisorV2((across_m - 1) % GROUP + 2)
        return replace(given(across_m, *rest), last=divisor)

    return order


NINE_ROWS_OF_TILES = TileCase(Tile(64), Case(1030, 128, 64, out_dtype=torch.bfloat16), 2)


def test_a_tile_left_out_is_noticed_in_every_schedule() -> None:
    """A tile left out is noticed even if its memory held the right result before."""
    problem = grid_problem(NINE_ROWS_OF_TILES.case)
    expected = torch.from_numpy(problem.expected()).bfloat16()

    def product_after_a_right_one() -> None:
        copies = [expected.clone() for _ in range(4)]
        del copies
        assert torch.equal(problem.run(gemm), expected)

    mutant = Mutant(KERNEL.swapped("kernel", "raster_order", taller_last_group))
    with compiled_anew(partial(use, NINE_ROWS_OF_TILES), mutant.change):
        for schedule in STANDARD:
            mutant.check(first_noticed(product_after_a_right_one, [schedule]))


def mlp() -> Tensor:
    """Launch two dependent products; the second reads the first one's result."""
    given = test_silu_mul_gemm.make_problem(pair_case(PAIR.case), grid=True).args
    args = {name: value for name, value in given.items() if name != "out_dtype"}
    data, scales = silu_mul_gemm(**args, output=Static(torch.tensor(1.0)))
    down = oracle.grid_operand(np.random.default_rng(1), 64, 2 * data.shape[1])
    return gemm(data, scales, down.data, down.scales, torch.ones(1), [64])


def test_a_kernel_waits_for_the_one_before() -> None:
    check_dependency_wait(mlp)


def test_tokens_wait_for_the_kernel_before() -> None:
    """The warp that loads tokens needs its own wait, although the epilogue waits as well."""
    check_caught(unwaited(without_in("griddepcontrol", "_load")), mlp, schedules=STANDARD[:1])
