"""Modelled time of NVIDIA's public block-scaled GEMM and of ours, same shapes, one cluster each.

python -m tests.modelled.compare --cutlass PATH

NVIDIA's GEMM has no split-K, no GEMV and no SiLU-mul: a gate and up pair is given to it as one
weight of twice the rows, and a single token as a product whose rows are the weights. The fastest of
NVIDIA's tiles is shown. NVIDIA's code comes from a CUTLASS checkout; none is included here.
"""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from nvfp4_kernels.gemm.sm100.choose import Problem, choose_config
from nvfp4_kernels.gemm.sm100.tile import EpilogueConfig
from nvfp4_kernels.tool.report import describe
from tests.emulator.timing.calibrate import run_example
from tests.emulator.timing.example import MARK
from tests.modelled.compare_static import EXAMPLE
from tests.modelled.gemm import CYCLES_PER_US, SHAPES, Modeller, Part, operand_bytes, part_of

Theirs = tuple[int, int, int, int]  # rows and columns of a tile, CTAs of a cluster along either
THEIRS: list[Theirs] = [
    (128, 64, 1, 1),
    (128, 128, 1, 1),
    (128, 128, 1, 2),
    (128, 256, 1, 1),
    (256, 64, 2, 1),
    (256, 128, 2, 1),
    (256, 256, 2, 1),
    (256, 256, 4, 1),
]
FEW = 32  # tokens
MOST_TILES = 60  # per cluster: with more tiles, smaller tiles are not the fastest


def theirs(script: Path, problem: Problem) -> tuple[float, str]:
    """Microseconds of NVIDIA's fastest tile, with the tile."""
    swap_ab = problem.m <= FEW
    tokens, weights = max(problem.m, 8 if swap_ab else 1), problem.n * problem.weights
    same = Problem(tokens, weights, problem.k, problem.batch)
    found = []
    for tile in THEIRS:
        part = _part(same, tile, swap_ab)
        # A tile with more rows, or more columns, than there are tokens only costs more.
        fits = tile[1] == 64 if swap_ab else _spans(tile)[0] <= max(tokens, 128)
        if fits and part.tiles <= MOST_TILES:
            time = _time(script, same, tile, part, swap_ab, operand_bytes(problem))
            found.append((time, _words(tile)))
    return min(found)


def _spans(tile: Theirs) -> tuple[int, int]:
    """Number of rows and number of columns that a cluster covers."""
    rows, columns, cluster_m, cluster_n = tile
    return rows * cluster_m // (rows // 128), columns * cluster_n


def _part(problem: Problem, tile: Theirs, swap_ab: bool) -> Part:
    return part_of(problem, _spans(tile), tile[2] * tile[3], swap_ab)


def _time(
    script: Path, problem: Problem, tile: Theirs, part: Part, swap_ab: bool, moved: float
) -> float:
    rows, columns, cluster_m, cluster_n = tile
    down, across = _spans(tile)
    if swap_ab:
        m, n = part.tiles * down, problem.m
    else:
        m, n = min(problem.m, down), part.tiles * across
    arguments = (
        f"--mnkl {m},{n},{problem.k},1 --mma_tiler_mn {rows},{columns} "
        f"--cluster_shape_mn {cluster_m},{cluster_n} --c_dtype BFloat16"
    )
    if swap_ab:
        arguments += " --c_major m"
    sms = cluster_m * cluster_n
    lines = run_example(script, arguments, sms, part.clusters, moved)
    timed = [json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)]
    return float(max(timed, key=lambda each: each["flops"])["cycles"]) / CYCLES_PER_US


def _words(tile: Theirs) -> str:
    rows, columns, cluster_m, cluster_n = tile
    cluster = "" if cluster_m * cluster_n == rows // 128 else f", clusters {cluster_m}×{cluster_n}"
    return f"{rows}×{columns}{' 2SM' if rows == 256 else ''}{cluster}"


def main(
    cutlass: Annotated[Path, typer.Option(help="checkout of NVIDIA/cutlass")],
    only: Annotated[str, typer.Option(help="products whose name contains this")] = "",
) -> None:
    """Print a row per shape."""
    script = cutlass / EXAMPLE
    if not script.is_file():
        raise typer.BadParameter(f"{script}: not there; give a checkout of NVIDIA/cutlass")
    modeller, output = Modeller(), EpilogueConfig("bfloat16")
    table = Table("product", "our tile", "µs", "NVIDIA's tile", "µs", "NVIDIA's / ours")
    for name, shape in SHAPES.items():
        if only not in name:
            continue
        problem = Problem(*shape)
        tile, out = choose_config(problem, output)
        own = modeller.time(problem, tile, out).microseconds
        other, words = theirs(script, problem)
        row = [name, describe(tile), f"{own:.2f}", words, f"{other:.2f}", f"{other / own:.2f}"]
        print(*row, sep=" | ", flush=True)
        table.add_row(*row)
    Console(width=140).print(table)


if __name__ == "__main__":
    typer.run(main)
