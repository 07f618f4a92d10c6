"""Terminal output of the comparison."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table as RichTable

from examples.accuracy.results import Results
from examples.accuracy.table import FOOTNOTE, Table, heading, kernels, remarks, tables

# In a file or a pipe, rows do not wrap.
console = Console(width=None if sys.stdout.isatty() else 190, highlight=False)


@contextmanager
def measuring(windows: int) -> Iterator[Callable[[str, str, int], None]]:
    """Progress bar of ``windows`` steps for each variant; yields a callback, ``Bench.on_state``."""
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    ) as progress:
        tasks: dict[str, TaskID] = {}

        def on_state(name: str, state: str, done: int) -> None:
            if name not in tasks:
                for task in tasks.values():
                    progress.stop_task(task)
                tasks[name] = progress.add_task(name, total=windows)
            progress.update(tasks[name], description=f"{name}: {state}", completed=done)

        yield on_state


def results(measured: Results) -> None:
    """Print heading and tables, then the kernels that ran, then failures and flags."""
    for line in heading(measured):
        plain(line)
    for table in tables(measured):
        console.print(_rich(table))
    console.print(FOOTNOTE, style="dim", markup=False)
    for line in kernels(measured):
        console.print(line, style="dim", markup=False, soft_wrap=True)
    for line in remarks(measured):
        console.print(line, style="red", markup=False, soft_wrap=True)


def plain(text: str) -> None:
    """Print a line."""
    console.print(text, markup=False, soft_wrap=True)


def _rich(table: Table) -> RichTable:
    made = RichTable(
        title=table.title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for index, name in enumerate(table.headings):
        made.add_column(name, justify="right" if index else "left", no_wrap=not index)
    for row in table.rows:
        made.add_row(*row, style="red" if row[-1] in ("wrong", "failed") else None)
    return made
