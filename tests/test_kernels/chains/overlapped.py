"""Every family of GEMM tiles overlapped with itself: two launches whose CTAs share SMs.

``python -m tests.test_kernels.chains.overlapped`` runs each family in every schedule. Rings have
two stages, so that CTAs of both launches fit on one SM if tensor memory allows it.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from nvfp4_kernels import gemm, silu_mul_gemm
from nvfp4_kernels.gemm.sm100.tile import Tile
from tests import devices
from tests.emulator import STANDARD, Schedule
from tests.emulator.machine.launch import Launch
from tests.test_kernels.gemm.linear_cases import Case, grid_problem
from tests.test_kernels.gemm.silu_mul import test_silu_mul_gemm
from tests.test_kernels.gemm.test_tiles_sm100 import TileCase, pair_case, use

SMALL = Tile(32, max_stages=2)
UP = replace(SMALL, weights=2)
TILES = {
    "plain": SMALL,
    "plain, all columns": Tile(128, max_stages=2),  # one CTA of an SM waits for the other to end
    "2 CTAs": replace(SMALL, two_cta=True, cluster_m=2),
    "2 CTAs, multicast": replace(SMALL, two_cta=True, cluster_m=2, cluster_n=2),
    "multicast": replace(SMALL, cluster_n=2),
    "split": replace(SMALL, columns=64, split_k=2),
    "swapped": replace(SMALL, swap_ab=True),
    "swapped, multicast": replace(SMALL, swap_ab=True, cluster_m=2),
    "swapped, split": replace(SMALL, columns=16, swap_ab=True, split_k=2),
    "gate and up": UP,
    "gate and up, 2 CTAs": replace(UP, two_cta=True, cluster_m=2),
    "gate and up, split": replace(UP, columns=64, split_k=2),
    "gate and up, swapped": replace(UP, swap_ab=True),
    "gate and up, swapped, split": replace(UP, columns=16, swap_ab=True, split_k=2),
}


def case_of(tile: Tile) -> TileCase:
    """Case with several tiles for one cluster."""
    case = Case(9 if tile.swap_ab else 130, 136, 288, out_dtype=torch.float32)
    is_split = tile.split_k > 1 and not tile.swap_ab  # split-K partials need the store's memory
    return TileCase(tile, case, tile.cluster, direct=is_split)


def run_twice(on: TileCase, schedule: Schedule, is_overlapped: bool = True) -> list[Launch]:
    """Launch a product twice, check both results and return the two launches."""
    linear = on.tile.weights == 1
    problem: Any = (
        grid_problem(on.case)
        if linear
        else test_silu_mul_gemm.make_problem(pair_case(on.case), grid=True)
    )
    expected = problem.expected() if linear else problem.gate * problem.up
    found = []

    def run() -> None:
        for _ in range(2):
            found.append(problem.run(gemm) if linear else silu_mul_gemm(**problem.args))

    with pytest.MonkeyPatch.context() as patch, devices.emulated_ops(schedule) as gpu:
        use(on, patch)
        if is_overlapped:
            with gpu.overlapped():
                run()
        else:
            run()
        for out in found:
            assert torch.equal(out, torch.from_numpy(expected).float())
        return list(gpu.launches)[-2:]


def check_met(launches: list[Launch]) -> None:
    """Assert that the launches shared SMs wherever two of their CTAs fit on one."""
    first, second = launches
    if first.needs.per_sm(first.gpu.limits) > 1:
        assert second.counters.neighbours[0] > 0


def main() -> None:
    """Print CTAs that shared an SM, and waits for tensor memory, for every family and schedule."""
    for name, tile in TILES.items():
        for schedule in STANDARD:
            launches = run_twice(case_of(tile), schedule)
            met = [launch.counters.neighbours[0] for launch in launches]
            waits = [launch.counters.waits["tensor memory"] for launch in launches]
            print(f"{name}, {schedule}: neighbours {met}, waits {waits}", flush=True)


if __name__ == "__main__":
    main()
