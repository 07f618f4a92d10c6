"""Kernels of sm_100 overlapped with themselves: two launches share SMs and tensor memory.

One tile for each kind of hand-over; ``overlapped`` has all families.
"""

from collections.abc import Callable
from typing import Any

import pytest

from nvfp4_kernels import paged_attention
from nvfp4_kernels.attention.sm100.tile import AttentionTile
from tests import devices
from tests.emulator import COPIES_LATE
from tests.mutants import Mutant, noticed
from tests.mutants.kernels import Room, compiled_anew
from tests.test_kernels.attention.attention_cases import Case as AttentionCase
from tests.test_kernels.attention.attention_sm100 import Chosen, check
from tests.test_kernels.chains.overlapped import TILES, case_of, check_met, run_twice
from tests.test_kernels.gemm.test_tiles_sm100 import FAMILIES

SCHEDULE = COPIES_LATE  # the successor runs first, and allocates as early as it can
SOME = [
    "plain, all columns",
    "2 CTAs, multicast",
    "multicast",
    "split",
    "swapped, split",
    "gate and up, 2 CTAs",
]


def test_there_is_a_tile_of_every_family() -> None:
    assert {case_of(tile).family for tile in TILES.values()} == set(FAMILIES)
    assert {word for name in SOME for word in name.split(", ")} >= {
        word for family in FAMILIES for word in family.split(", ")
    }


@pytest.mark.parametrize("name", SOME)
def test_products(name: str) -> None:
    launches = run_twice(case_of(TILES[name]), SCHEDULE)
    check_met(launches)
    if TILES[name].tensor_columns == 512:
        assert sum(launch.counters.waits["tensor memory"] for launch in launches) > 0


def test_attention() -> None:
    problem = AttentionCase((3,), (300,), query_heads=2, heads=1).problem()
    tile = AttentionTile(64, ctas_per_sm=2, max_stages=2)
    with pytest.MonkeyPatch.context() as patch, devices.emulated_ops(SCHEDULE) as gpu:
        Chosen(tile).use(patch)
        with gpu.overlapped():
            results = [paged_attention(**problem.paged()) for _ in range(2)]
        for result in results:
            check(result, problem)
        check_met(list(gpu.launches)[-2:])


def released_before_allocation(given: Callable[..., None]) -> Callable[..., None]:
    """Mutant: release dependents before tensor memory is allocated."""

    def allocate(*args: Any, **named: Any) -> None:
        from cutlass.experimental import primitives as ptx

        ptx.griddepcontrol(ptx.GridDepAction.LAUNCH_DEPENDENTS)
        given(*args, **named)

    return allocate


def column_zero(*given: Any) -> tuple[Any, ...]:
    """Mutant: accumulate in column zero, whatever was allocated."""
    from cutlass import Int32

    *others, _, state = given
    return *others, Int32(0), state


KERNEL = Room("nvfp4_kernels.gemm.sm100")
PRIMITIVES = Room("cutlass.experimental")
MUTANTS = {
    "dependents released before tensor memory is allocated": Mutant(
        PRIMITIVES.swapped("primitives", "tcgen05_alloc", released_before_allocation),
        "Deadlock",
        "plain, all columns",
        r"remedy: in kernel_.*, allocate before griddepcontrol\.launch_dependents",
    ),
    "accumulators from column 0 on": Mutant(
        KERNEL.with_arguments("mma:Mma", "run", column_zero),
        "TensorMemoryMisuse",
        "plain",
        r"columns \[64, 68\): allocated are \[128, 256\)",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_reported(name: str) -> None:
    """A mutant gives right results if no CTAs share an SM, and is reported if CTAs do."""
    mutant = MUTANTS[name]
    on = case_of(TILES[mutant.on])
    with compiled_anew(mutant.change):
        run_twice(on, SCHEDULE, is_overlapped=False)
        mutant.check(noticed(lambda: run_twice(on, SCHEDULE)))
