"""Modelled time of NVIDIA's public attention example and of ours: one CTA of 256 queries.

python -m tests.modelled.compare_attention --cutlass PATH

All queries see all keys. NVIDIA's ``fmha.py`` reads dense keys, our kernel pages of 16. NVIDIA's
code comes from a CUTLASS checkout; none is included here.
"""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from nvfp4_kernels.attention.sm100.choose import choose_config
from nvfp4_kernels.attention.sm100.tile import KEYS
from tests.emulator.timing.calibrate import run_example
from tests.emulator.timing.example import MARK
from tests.modelled.attention import CLOCK, FLOPS, SMS, Modeller, Shape

EXAMPLE = "examples/python/CuTeDSL/cute/blackwell/kernel/attention/fmha/fmha.py"
QUERIES = 256
FEW, MANY = 8, 12  # key tiles


def theirs(script: Path, head_dim: int, keys: int) -> float:
    """Cycles of NVIDIA's kernel."""
    arguments = (
        f"--q_shape 1,{QUERIES},1,{head_dim} --k_shape 1,{keys},1,{head_dim} "
        "--in_dtype BFloat16 --out_dtype BFloat16 --warmup_iterations 0"
    )
    lines = run_example(script, arguments, sms=1)
    timed = [json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)]
    return float(max(timed, key=lambda each: each["flops"])["cycles"])


def ours(modeller: Modeller, head_dim: int, keys: int) -> float:
    """Cycles of our kernel with its causal mask: the queries are their sequence's last tokens."""
    shape = Shape(1, QUERIES, QUERIES + keys, head_dim, kv_heads=1, group=1)
    tile, _ = choose_config(shape.problem())
    return modeller.run(tile, shape, split=False).cycles


def main(cutlass: Annotated[Path, typer.Option(help="checkout of NVIDIA/cutlass")]) -> None:
    """Prints a row per kernel and head dimension."""
    script = cutlass / EXAMPLE
    if not script.is_file():
        raise typer.BadParameter(f"{script}: not there; give a checkout of NVIDIA/cutlass")
    modeller = Modeller()
    table = Table("kernel", "head dim", "cycles per 128 keys", "of the MMA roofline", "TFLOP/s")
    for head_dim in (64, 128):
        runs = {
            "NVIDIA's fmha": [theirs(script, head_dim, KEYS * n) for n in (FEW, MANY)],
            "ours": [ours(modeller, head_dim, KEYS * n) for n in (FEW, MANY)],
        }
        flops = 4.0 * QUERIES * KEYS * head_dim
        bound = flops / FLOPS[False] * SMS * CLOCK
        for name, (few, many) in runs.items():
            each = (many - few) / (MANY - FEW)
            rate = flops / each * CLOCK * SMS / 1e12
            row = [name, str(head_dim), f"{each:.0f}", f"{bound / each:.0%}", f"{rate:.0f}"]
            print(*row, sep=" | ", flush=True)
            table.add_row(*row)
    Console(width=100).print(table)


if __name__ == "__main__":
    typer.run(main)
