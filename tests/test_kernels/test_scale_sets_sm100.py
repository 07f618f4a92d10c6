"""Sets of scale columns in a pipe with only the ordering that the PTX ISA promises.

With one set, the copy of a step's scales overwrites scales that earlier MMAs may still read, which
is reported. With two sets, the copy waits for those MMAs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from nvfp4_kernels import gemm, silu_mul_gemm
from nvfp4_kernels.gemm.sm100.tile import Tile
from nvfp4_kernels.indexer.sm100.tile import ScoreTile
from tests import devices
from tests.emulator import STANDARD, Schedule
from tests.emulator.findings import DataRace
from tests.mutants.kernels import compiled_anew
from tests.test_kernels.gemm import linear_cases
from tests.test_kernels.gemm.silu_mul import test_silu_mul_gemm
from tests.test_kernels.gemm.test_sm100 import on
from tests.test_kernels.gemm.test_tiles_sm100 import TileCase, pair_case, use
from tests.test_kernels.indexer import indexer_cases, indexer_sm100

CPU = torch.device("cpu")
CASE = linear_cases.Case(200, 144, 1568, out_dtype=torch.bfloat16)
FEW = replace(CASE, m=7)
# Rings and sets go round several times.
TILES = {
    "128x64": (Tile(64), CASE),
    "128x128, two stages": (Tile(128, max_stages=2), CASE),
    "256x128": (Tile(128, two_cta=True, cluster_m=2), CASE),
    "256x128, multicast": (Tile(128, two_cta=True, cluster_m=4), CASE),
    "swapped 8, split 2": (Tile(8, swap_ab=True, split_k=2), FEW),
    "pair": (Tile(64, 2), CASE),
}
SCHEDULES = [schedule for schedule in STANDARD if schedule.name in ("all late", "random 1")]
EVERY_SCHEDULE = pytest.mark.parametrize("schedule", SCHEDULES, ids=str)


def run_gemm(name: str, sets: int, patch: pytest.MonkeyPatch) -> None:
    tile, case = TILES[name]
    use(TileCase(replace(tile, scale_sets=sets), case, 4), patch)
    if tile.weights == 1:
        linear_cases.check_exact(on(CPU, gemm), case)
    else:
        test_silu_mul_gemm.check_exact(on(CPU, silu_mul_gemm), pair_case(case))


def run_indexer(name: str, sets: int, patch: pytest.MonkeyPatch) -> None:
    tile = ScoreTile("nvfp4", 64, 16, pingpong=2, max_stages=3, scale_sets=sets)
    indexer_sm100.Chosen(tile).use(patch)
    problem = indexer_cases.Case(((900,),), heads=16, block_size=64).problem("nvfp4")
    indexer_sm100.run_paged(problem, CPU)


RUNS: dict[str, Callable[[str, int, pytest.MonkeyPatch], None]] = {
    **dict.fromkeys(TILES, run_gemm),
    "indexer": run_indexer,
}
MMAS = {name: "indexer" if name == "indexer" else "gemm" for name in RUNS}


@contextmanager
def strict_pipe(schedule: Schedule) -> Iterator[pytest.MonkeyPatch]:
    """Context of an emulator whose pipe keeps only the promised order."""
    devices.cutlass_or_skip()
    with (
        compiled_anew(),  # a mutant must not share the other kernels' cache
        devices.emulated_ops(schedule) as gpu,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(gpu, "strict_pipe_order", True)
        yield patch


@EVERY_SCHEDULE
@pytest.mark.parametrize("name", RUNS)
def test_two_sets_rely_on_nothing(name: str, schedule: Schedule) -> None:
    with strict_pipe(schedule) as patch:
        RUNS[name](name, 2, patch)


@pytest.mark.parametrize("name", RUNS)
def test_one_set_relies_on_the_pipe(name: str) -> None:
    with strict_pipe(SCHEDULES[0]) as patch, pytest.raises(DataRace, match=r"tcgen05\.cp"):
        RUNS[name](name, 1, patch)


@pytest.mark.parametrize("name", ["128x64", "256x128", "indexer"])
def test_two_sets_have_to_wait(name: str) -> None:
    """A copy that does not wait for the MMAs is reported as a data race."""
    with strict_pipe(SCHEDULES[0]) as patch:
        module = import_module(f"nvfp4_kernels.{MMAS[name]}.sm100.mma")
        acquire = module.Mma._acquire_scales

        def without_wait(self: object, *arguments: object) -> object:
            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(module, "wait", lambda *_: None)
                return acquire(self, *arguments)

        patch.setattr(module.Mma, "_acquire_scales", without_wait)
        with pytest.raises(DataRace, match=r"tcgen05\.cp"):
            RUNS[name](name, 2, patch)
