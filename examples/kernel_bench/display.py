"""Terminal output of the results."""

import sys
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from examples.kernel_bench.results import Results
from examples.kernel_bench.table import footnote, heading, layer_tables, refusals

# In a file or a pipe, rows do not wrap.
console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)


def tables(results: Results) -> None:
    """Print the heading, a table for each layer, and the refusals."""
    for line in heading(results):
        console.print(line, markup=False, soft_wrap=True)
    for layer in layer_tables(results):
        table = Table(
            title=layer.title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
        )
        for name in layer.headings:
            style = "bold" if name.startswith("ours") else None
            table.add_column(name, justify="right", style=style, no_wrap=True)
        for row in layer.rows:
            cells = zip(layer.headings, row, strict=True)
            table.add_row(*(_cell(name, text) for name, text in cells))
        console.print(table)
    console.print(footnote(results), style="dim", markup=False)
    for line in refusals(results):
        console.print(line, style="yellow", markup=False)


def written(file: Path) -> None:
    """Print the path of a written file."""
    console.print(f"written: {file}", markup=False)


def _cell(heading_text: str, text: str) -> Text:
    if text.endswith("WRONG"):
        return Text(text, style="red")
    if heading_text.startswith("×") and text:
        return Text(text, style="green" if float(text) >= 1 else "red")
    return Text(text)
