"""Mutants of the scoring kernel: each mutant is reported, or its scores are wrong."""

from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch

from nvfp4_kernels.indexer.sm100.tile import ScoreTile
from tests.mutants import ANYTHING, WRONG, Mutant
from tests.mutants.kernels import (
    Room,
    changed,
    check_caught,
    check_dependency_wait,
    check_nothing_to_catch,
    nothing,
    said,
    without,
)
from tests.test_kernels.indexer.indexer_cases import Case, Problem, run_logits
from tests.test_kernels.indexer.indexer_sm100 import Chosen, run_paged

KERNEL = Room("nvfp4_kernels.indexer.sm100")

# Rings and accumulators go round more than once; two words of scales, two groups of rows.
NVFP4 = Chosen(ScoreTile("nvfp4", 128, 20, 1, 2, doubled=5, max_stages=3))
FP8 = Chosen(ScoreTile("fp8", 64, 8, 2, 1, pingpong=2, max_stages=3))
# One sequence has key tiles that the other lacks.
CASE = {"lens": ((650, 649), (100, 70)), "next_n": 2, "block_size": 64}
NAN_KEY = 5


def codes_as_integers(patch: pytest.MonkeyPatch) -> None:
    """Mutant: decode E2M1 codes as integers."""
    from tests.emulator.tcgen05 import formats

    codes = np.arange(256, dtype=np.uint8)
    values = np.stack([codes & 15, codes >> 4], -1).astype(np.float32)
    values = np.where(values < 8, values, 8 - values).astype(np.float32)
    patch.setattr(formats, "_E2M1_PAIRS", np.ascontiguousarray(values).view(np.float64)[:, 0])


def query_nibbles_swapped(patch: pytest.MonkeyPatch) -> None:
    op = import_module("nvfp4_kernels.indexer.sm100.launch_logits")
    given = op.launch

    def launch(kernel: Any, arguments: Any) -> None:
        q = arguments.inputs.q
        given(kernel, arguments._replace(inputs=arguments.inputs._replace(q=q >> 4 | q << 4)))

    patch.setattr(op, "launch", launch)


def copies_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    from cutlass import cute

    patch.setattr(cute.arch, "cp_async_wait_group", nothing)


def no_relu(self: Any, values: list[Any], doubled: bool) -> tuple[Any, ...]:
    return tuple(value * (2.0 if doubled else 1.0) for value in values)


MUTANTS = {
    "E2M1 read as an integer": Mutant(codes_as_integers, WRONG),
    "queries' nibbles swapped": Mutant(query_nibbles_swapped, WRONG),
    "scales of the neighbouring blocks": Mutant(
        KERNEL.replaced("mma", "MMA_SCALES", {"nvfp4": 0}), WRONG
    ),
    "scales of queries in the wrong row group": Mutant(
        KERNEL.with_arguments(
            "scales:ScaleLoader", "_store", lambda a, words, n: (a, words[::-1], n)
        ),
        WRONG,
    ),
    "scales of the key tile before": Mutant(
        KERNEL.with_arguments(
            "scales:ScaleLoader", "_copy", lambda a, p, s, i, *r: (a, p, s, i - 1, *r)
        ),
        ANYTHING,
    ),
    "signs of scales left": Mutant(
        KERNEL.replaced("scales", "UNSIGNED", 0xFFFFFFFF), "IllegalInstruction"
    ),
    "no relu": Mutant(KERNEL.replaced("epilogue:Epilogue", "_relu", no_relu), WRONG),
    "doubled, but weights not halved": Mutant(
        KERNEL.replaced("weights:WeightLoader", "_halved", lambda self, head, weight: weight), WRONG
    ),
    "weight of the neighbouring head": Mutant(
        KERNEL.with_result("weights:WeightLoader", "_row", lambda row: row[1:] + row[:1]), WRONG
    ),
    "weights of another query": Mutant(
        KERNEL.with_arguments("weights:WeightLoader", "run", lambda w, s, first: (w, s, first + 1)),
        WRONG,
    ),
    "factor of another key": Mutant(
        KERNEL.with_arguments(
            "epilogue:Epilogue",
            "_factor",
            lambda f, b, i, coord, leader: (f, b, i, replace(coord, warp=coord.warp ^ 1), leader),
        ),
        WRONG,
        FP8,
    ),
    "a key too many is seen": Mutant(
        KERNEL.with_result("logits", "key_range", lambda seen: replace(seen, end=seen.end + 1)),
        WRONG,
    ),
    "masked key tiles left": Mutant(
        KERNEL.replaced("logits:LogitsVisitor", "_store_masked", nothing), WRONG
    ),
    "scales read behind a context": Mutant(
        KERNEL.with_arguments(
            "scales:ScaleLoader",
            "_copy",
            lambda a, p, s, *r: (a, p, replace(s, key_end=s.num_keys + 99), *r),
        ),
        "OutOfBounds",
    ),
    "the loader does not wait for the ring": Mutant(
        KERNEL.replaced("loader", "wait", nothing), "DataRace"
    ),
    "scales do not wait for the ring": Mutant(
        KERNEL.replaced("scales", "wait", nothing), "DataRace"
    ),
    "MMAs wait for nothing": Mutant(KERNEL.replaced("mma", "wait", nothing), ANYTHING),
    "the epilogue waits for nothing": Mutant(
        KERNEL.replaced("epilogue", "wait", nothing), ANYTHING
    ),
    "factors are not waited for": Mutant(
        KERNEL.replaced("epilogue", "wait", nothing), ANYTHING, FP8
    ),
    "scales published before they are copied": Mutant(copies_not_waited_for, ANYTHING),
    "one warp need not arrive": Mutant(KERNEL.replaced("barriers", "GROUP_WARPS", 3), ANYTHING),
    "one reader of factors need not arrive": Mutant(
        KERNEL.replaced("barriers", "GROUP_WARPS", 3), ANYTHING, FP8
    ),
    "one warp too many": Mutant(KERNEL.replaced("barriers", "GROUP_WARPS", 5), "Deadlock"),
    "bytes expected twice": Mutant(
        changed("mbarrier_arrive_expect_tx", lambda barrier, n: (barrier, 2 * n)), "Deadlock"
    ),
    "no wait for tcgen05.ld": Mutant(without("tcgen05_wait", said("load")), "UnwaitedLoad"),
    "no tcgen05 fence": Mutant(without("tcgen05_fence"), "MissingTensorFence"),
    "no proxy fence after scales": Mutant(without("fence_proxy"), "MissingProxyFence"),
    "tensor memory kept": Mutant(without("tcgen05_dealloc"), "TensorMemoryMisuse"),
}


def problem_of(chosen: Chosen) -> Problem:
    """Problem in which one key has a scale of −NaN."""
    tile = chosen.tile
    problem = Case(**CASE, heads=tile.num_heads, head_dim=tile.head_dim).problem(tile.fmt)
    if tile.fmt == "nvfp4":
        keys = problem.keys[0]
        assert keys.scales is not None
        keys.scales.view(torch.uint8)[NAN_KEY] = 0xFF
        keys.values[NAN_KEY] = np.nan
    return problem


def check(chosen: Chosen) -> None:
    run_paged(problem_of(chosen), torch.device("cpu"))


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_caught(mutant: Mutant) -> None:
    on = mutant.on or NVFP4
    check_caught(mutant, partial(check, on), on.use)


@pytest.mark.parametrize("chosen", [NVFP4, FP8], ids=["nvfp4", "fp8"])
def test_nothing_to_catch(chosen: Chosen) -> None:
    check_nothing_to_catch(partial(check, chosen), chosen.use)


def twice() -> None:
    """Launch two scorings; the second one's weights are the first one's scores."""
    arguments = Case(((20,), (20,)), heads=40).problem("nvfp4").contiguous()
    scores = run_logits(**arguments)
    run_logits(**arguments | {"weights": scores})


def test_the_kernel_waits_for_the_one_before() -> None:
    check_dependency_wait(twice)
