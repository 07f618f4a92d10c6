"""Table that ``build`` prints: one row per op and layers served, then the failed kernels."""

from collections import defaultdict
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from nvfp4_kernels.precompile.spec import KernelSpec
from nvfp4_kernels.settings import CACHE_VARIABLE
from nvfp4_kernels.tool.build import Built
from nvfp4_kernels.tool.console import output
from nvfp4_kernels.tool.mixture import Mixture


def print_built(
    mixture: Mixture,
    specs: dict[KernelSpec, list[str]],
    done: list[Built],
    out: Path,
    seconds: float,
) -> None:
    """Print the numbers of cached, compiled and failed kernels, by op and layers; then errors."""
    groups: dict[tuple[str, str], list[Built]] = defaultdict(list)
    for built in sorted(done, key=lambda b: list(specs).index(b.spec)):
        groups[built.spec.op, ", ".join(specs[built.spec])].append(built)
    model = mixture.dense
    table = Table(title=f"Kernels of {escape(model.name)}, {model.dtype}", title_justify="left")
    table.add_column("kernel")
    table.add_column("layers", overflow="fold")
    for column in ("configurations", "there already", "compiled", "failed", "s", "MB"):
        table.add_column(column, justify="right")
    for (op, layers), builts in groups.items():
        table.add_row(op, layers, *_figures(builts))
    table.add_section()
    table.add_row("all", "", *_figures(done))
    screen = output()
    screen.print(table)
    for built in done:
        if built.error:
            screen.print(f"[red]{escape(str(built.spec.kernel()))}: {escape(built.error)}[/]")
    if not specs:
        screen.print("Nothing to build: the library has no kernels for these layers.")
    elif all(b.seconds == 0 and not b.error for b in done):
        screen.print(f"Everything was there already ({seconds:.1f} s).")
    else:
        screen.print(f"{seconds:.1f} s in all.")
    if mixture.left_out:
        screen.print(f"Not among them: {escape(mixture.left_out)}; they compile on first use.")
    screen.print(f"Serve with {CACHE_VARIABLE}={escape(str(out.resolve()))}")


def _figures(builts: list[Built]) -> list[str]:
    there = sum(b.seconds == 0 and not b.error for b in builts)
    failed = sum(bool(b.error) for b in builts)
    seconds, nbytes = sum(b.seconds for b in builts), sum(b.nbytes for b in builts)
    counts = [len(builts), there, len(builts) - there - failed, failed]
    return [*map(str, counts), f"{seconds:.1f}", f"{nbytes / 1e6:.2f}"]
