"""Static report of NVIDIA's public block-scaled GEMM and of ours, tile by tile.

python -m tests.modelled.compare_static --cutlass PATH

Compiles for sm_100a without a GPU. NVIDIA's code comes from a CUTLASS checkout; none is included
here.
"""

import os
import runpy
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from nvfp4_kernels.gemm.sm100.tile import EpilogueConfig, Tile
from nvfp4_kernels.runtime.compile import ARCH_VARIABLE
from nvfp4_kernels.tool.instructions import SHOWN, find_nvdisasm
from nvfp4_kernels.tool.report import describe
from nvfp4_kernels.tool.static import Static, measure, measure_compiled

EXAMPLE = (
    "examples/python/CuTeDSL/cute/blackwell/kernel/blockscaled_gemm/"
    "dense_blockscaled_gemm_persistent.py"
)
KERNEL = "Sm100BlockScaledPersistentDenseGemmKernel"
TILES = (
    Tile(64),
    Tile(128),
    Tile(256),
    Tile(64, two_cta=True, cluster_m=2),
    Tile(128, two_cta=True, cluster_m=2),
    Tile(256, two_cta=True, cluster_m=2),
    Tile(256, two_cta=True, cluster_m=4),
)
ALSO = ("MEMBAR", "CCTL", "NANOSLEEP", "R2UR")


def theirs(example: dict[str, Any], tile: Tile, nvdisasm: Path) -> tuple[Static, int, int]:
    """Static figures of NVIDIA's kernel; numbers of its stages and of its tensor memory columns."""
    import cutlass
    from cutlass.cute.runtime import make_fake_stream

    kernel = example[KERNEL](16, (tile.rows, tile.columns), (tile.cluster_m, tile.cluster_n))
    fp4, fp8, bf16 = cutlass.Float4E2M1FN, cutlass.Float8E4M3FN, cutlass.BFloat16
    clusters = 148 // tile.cluster
    compiled = example["scaled_mm"](
        kernel, fp4, fp4, bf16, fp8, "k", "k", "n", clusters, make_fake_stream()
    )
    return measure_compiled(compiled, nvdisasm), kernel.num_ab_stage, kernel.num_tmem_alloc_cols


def ours(tile: Tile, nvdisasm: Path) -> tuple[Static, int, int]:
    """Static figures of our kernel; numbers of its stages and of its tensor memory columns."""
    from nvfp4_kernels.gemm.sm100.kernel import BlockScaledGemm

    kernel = BlockScaledGemm(tile, EpilogueConfig("bfloat16", store="tma"))
    return measure(kernel, nvdisasm), kernel.stages, tile.tensor_columns


def main(cutlass: Annotated[Path, typer.Option(help="checkout of NVIDIA/cutlass")]) -> None:
    """Print a table with two rows per tile."""
    script = cutlass / EXAMPLE
    if not script.is_file():
        raise typer.BadParameter(f"{script}: not there; give a checkout of NVIDIA/cutlass")
    os.environ[ARCH_VARIABLE] = "sm_100a"
    example = runpy.run_path(str(script))
    nvdisasm = find_nvdisasm()
    table = Table(title="NVFP4 × NVFP4 to bfloat16")
    for column in ("tile", "whose", "stages", "registers", "spilled", "shared", "TMEM", "code"):
        table.add_column(column)
    for column in (*SHOWN, *ALSO):
        table.add_column(column, justify="right")
    for tile in TILES:
        both = {"ours": ours(tile, nvdisasm), "NVIDIA": _try(example, tile, nvdisasm)}
        for whose, measured in both.items():
            if isinstance(measured, str):
                table.add_row(describe(tile), whose, measured)
                continue
            static, stages, columns = measured
            mix = [static.instructions.get(name, 0) for name in (*SHOWN, *ALSO)]
            table.add_row(
                describe(tile), whose, str(stages), str(static.registers),
                f"{static.local_bytes} B", f"{static.shared_bytes / 1024:.0f} KB", str(columns),
                f"{static.code_bytes / 1024:.0f} KB", *map(str, mix),
            )  # fmt: skip
        table.add_section()
    Console(width=240).print(table)


def _try(example: dict[str, Any], tile: Tile, nvdisasm: Path) -> tuple[Static, int, int] | str:
    try:
        return theirs(example, tile, nvdisasm)
    except Exception as error:  # a tile that NVIDIA's kernel lacks is a row with the reason
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


if __name__ == "__main__":
    typer.run(main)
