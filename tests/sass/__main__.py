"""Check the descriptors of every kernel that a model, and an indexer, needs on sm_100.

python -m tests.sass [MODEL] [--arch sm_100a] [--jobs 2]

Compiles without a GPU. Without a model: Llama 3 8B. Ends with status 1 if a kernel has a fault.
"""

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from nvfp4_kernels.devices import UnknownArchitecture, members, parse_arch, spellings, target_of
from nvfp4_kernels.precompile.attention_sm100 import attention_kernels
from nvfp4_kernels.precompile.linear_sm100 import block_scaled_kernels
from nvfp4_kernels.precompile.model import Attention
from nvfp4_kernels.precompile.spec import KernelSpec
from nvfp4_kernels.tool.console import refusals
from nvfp4_kernels.tool.instructions import find_nvdisasm
from nvfp4_kernels.tool.model import read_model
from nvfp4_kernels.tool.scoring import choose_scorer, deepseek_shapes
from nvfp4_kernels.tool.shapes import LLAMA_8B
from tests.sass.compiled import check_all
from tests.sass.descriptors import Checked

ARCHS = members("sm_100")
MAX_TOKENS = 8192  # of a batch
LLAMA_ATTENTION = Attention(query_heads=32, kv_heads=8, head_dim=128)


def specs(model: Path | None) -> list[KernelSpec]:
    """Kernels of the model's layers and attention, and of the indexer in DeepSeek's shapes."""
    chosen = LLAMA_8B if model is None else read_model(model)
    attention = LLAMA_ATTENTION if model is None else chosen.attention
    found = list(block_scaled_kernels(chosen, max_tokens=MAX_TOKENS))
    if attention is not None:
        found += attention_kernels(attention, chosen.dtype)
    found += [choose_scorer(shape).spec for shape in deepseek_shapes()]
    return list(dict.fromkeys(found))


def main(
    model: Annotated[Path | None, typer.Argument(help="config.json of a model.")] = None,
    arch: Annotated[str, typer.Option(help=f"GPU to compile for: {spellings(ARCHS)}.")] = "sm_100a",
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 2,
) -> None:
    """Compile, disassemble, check, and print a table."""
    with refusals(UnknownArchitecture):
        target = target_of(parse_arch("--arch", arch, ARCHS))
    table = Table(title=f"Descriptors, {target}", title_justify="left")
    for column in ("kernel", "variants", "descriptors read", "high words", "faults"):
        table.add_column(column)
    outcomes: dict[str, list[Checked]] = {}
    screen = Console()
    for spec, checked in check_all(specs(model), target, find_nvdisasm(), jobs):
        outcomes.setdefault(spec.op, []).append(checked)
        for fault in checked.faults:
            screen.print(f"{spec.fields}: {fault}", soft_wrap=True, highlight=False)
    for op, found in outcomes.items():
        readers = sum((each.readers for each in found), Counter[str]())
        words = sorted({word for each in found for word in each.high_words})
        table.add_row(
            op,
            str(len(found)),
            ", ".join(f"{name} {count}" for name, count in readers.items()) or "none",
            ", ".join(f"{word:#x}" for word in words),
            str(sum(len(each.faults) for each in found)),
        )
    screen.print(table)
    if any(each.faults for found in outcomes.values() for each in found):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
