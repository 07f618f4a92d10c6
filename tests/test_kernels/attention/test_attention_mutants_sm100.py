"""Mutants of sm_100 attention: each mutant is reported, or its results are wrong."""

from functools import partial

import pytest

from nvfp4_kernels import attention, paged_attention
from nvfp4_kernels.attention.sm100.tile import AttentionTile
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
from tests.test_kernels.attention.attention_cases import Case, growing_by_parts
from tests.test_kernels.attention.attention_sm100 import Chosen, check

KERNEL = Room("nvfp4_kernels.attention.sm100")

# The ring goes round more than once; O is rescaled; free slots of the last page hold NaN.
TWO_TILES = Chosen(AttentionTile(64, 2, max_stages=3))
P_IN_S = Chosen(AttentionTile(128, 2))  # P in the columns of S
S_IN_PARTS = Chosen(AttentionTile(128, 2, fp8=True, emulated_exp2=6))
QK_FIRST = Chosen(AttentionTile(64, 1, max_stages=3))  # two stages of S
WARP_SPLIT = Chosen(AttentionTile(64, warp_split_kv=True))
CASE = {"queries": (150,), "keys": (389,), "query_heads": 2, "heads": 1, "scale": 4.0}


MUTANTS = {
    "PV does not wait for P": Mutant(
        KERNEL.replaced("mma", "wait_p_full", nothing), "DataRace", P_IN_S
    ),
    "O rescaled while PV adds to it": Mutant(
        KERNEL.replaced("softmax", "wait_o_full", nothing), "UninitialisedRead", QK_FIRST
    ),
    "PV of the second part does not wait for it": Mutant(
        KERNEL.with_arguments("mma", "wait_p_full", lambda *a: (*a[:-1], 0)), "DataRace", P_IN_S
    ),
    "O rescaled while PV of the first part adds to it": Mutant(
        KERNEL.replaced("softmax", "wait_o_full", nothing), "UninitialisedRead", P_IN_S
    ),
    "QK of the second part is not waited for": Mutant(
        KERNEL.with_arguments("softmax", "s_full_barrier", lambda *a: (*a[:-1], 0)),
        "DataRace",
        S_IN_PARTS,
    ),
    "PV of the second part does not wait for it, S in parts": Mutant(
        KERNEL.with_arguments("mma", "wait_p_full", lambda *a: (*a[:-1], 0)), "DataRace", S_IN_PARTS
    ),
    "P too large for E4M3 is not noticed": Mutant(
        KERNEL.with_result("softmax:Softmax", "_overflow", lambda found: found & False),
        WRONG,
        S_IN_PARTS,
    ),
    "O read before the last PV": Mutant(
        KERNEL.replaced("epilogue", "wait_o_full", nothing), "DataRace"
    ),
    "O not rescaled": Mutant(KERNEL.replaced("softmax:Softmax", "_rescale", nothing), WRONG),
    "O accumulated from the start": Mutant(
        KERNEL.with_arguments("mma:Mma", "_pv_mmas", lambda *a: (*a[:-1], True)),
        "UninitialisedRead",
    ),
    "divided by the sum twice": Mutant(
        KERNEL.with_result("epilogue:Epilogue", "_normalise", lambda r: (r[0], r[1] * r[1])), WRONG
    ),
    "one warp need not arrive": Mutant(
        KERNEL.replaced("barriers", "SOFTMAX_ARRIVALS", 3), ANYTHING
    ),
    "one warp too many": Mutant(KERNEL.replaced("barriers", "SOFTMAX_ARRIVALS", 5), "Deadlock"),
    "no wait for tcgen05.ld": Mutant(without("tcgen05_wait", said("load")), "UnwaitedLoad"),
    "no wait for tcgen05.st": Mutant(without("tcgen05_wait", said("store")), "DataRace"),
    "no tcgen05 fence": Mutant(without("tcgen05_fence"), "MissingTensorFence"),
    "no proxy fence after Q and zeros": Mutant(without("fence_proxy"), "MissingProxyFence"),
    "no warp barrier": Mutant(without("bar_warp_sync"), "DataRace"),
    "the ring is not waited for": Mutant(KERNEL.replaced("loader", "wait", nothing), "DataRace"),
    "bytes expected twice": Mutant(
        changed("mbarrier_arrive_expect_tx", lambda barrier, n: (barrier, 2 * n)), "Deadlock"
    ),
    "what follows the last value is left": Mutant(
        KERNEL.replaced("loader:TmaLoader", "_zero_tail", nothing), WRONG
    ),
    "a key too many is seen": Mutant(
        KERNEL.with_arguments("softmax:Softmax", "_mask", lambda scores, b, e: (scores, b, e + 1)),
        WRONG,
    ),
    "nothing is masked": Mutant(
        KERNEL.with_arguments(
            "softmax:Softmax", "_mask", lambda scores, b, e: (scores, b, e + 999)
        ),
        WRONG,
    ),
    "warp split: other warps' columns of P are left": Mutant(
        KERNEL.replaced("softmax", "WARPS", 1), WRONG, WARP_SPLIT
    ),
    "warp split: every part counts in full": Mutant(
        KERNEL.with_result(
            "epilogue_warp_split:WarpSplitEpilogue", "_combine", lambda r: (r[0], r[1] * 0 + 1)
        ),
        WRONG,
        WARP_SPLIT,
    ),
    "warp split: one part's sum": Mutant(
        KERNEL.with_result(
            "epilogue_warp_split:WarpSplitEpilogue", "_sum_warps", lambda r: [x * 0.25 for x in r]
        ),
        WRONG,
        WARP_SPLIT,
    ),
    "warp split: warps do not sync": Mutant(
        KERNEL.replaced("epilogue_warp_split:WarpSplitEpilogue", "_sync", nothing),
        ANYTHING,
        WARP_SPLIT,
    ),
    "warp split: too few threads sync": Mutant(
        KERNEL.replaced("epilogue_warp_split", "THREADS", 96), ANYTHING, WARP_SPLIT
    ),
    "zeros a stage beyond the ring": Mutant(
        KERNEL.with_arguments(
            "loader:TmaLoader", "_zero_tail", lambda source, stage, rows: (source, 3, rows)
        ),
        "ArrayOverrun",
    ),
    "tensor memory kept": Mutant(without("tcgen05_dealloc"), "TensorMemoryMisuse"),
}


def check_tile(chosen: Chosen) -> None:
    tile = chosen.tile
    # Keys with such a spread of logits count down to E4M3's subnormals, which no error bound
    # covers.
    given = Case(**CASE, head_dim=tile.head_dim)
    problem = growing_by_parts(fp8=True, keys=384) if tile.fp8 else given.problem()
    check(paged_attention(**problem.paged()), problem)


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_caught(mutant: Mutant) -> None:
    on = mutant.on or TWO_TILES
    check_caught(mutant, partial(check_tile, on), on.use)


@pytest.mark.parametrize(
    "chosen",
    [TWO_TILES, P_IN_S, S_IN_PARTS, QK_FIRST, WARP_SPLIT],
    ids=["two tiles", "P in S", "S in parts", "QK first", "warp split"],
)
def test_nothing_to_catch(chosen: Chosen) -> None:
    check_nothing_to_catch(partial(check_tile, chosen), chosen.use)


def twice() -> None:
    """Launch two attentions; the second one's queries are the first one's result."""
    arguments = Case((20,), (20,), 1, 1, causal=False).problem().dense()
    out, _ = attention(**arguments)
    attention(**arguments | {"q": out})


def test_the_kernel_waits_for_the_one_before() -> None:
    check_dependency_wait(twice)
