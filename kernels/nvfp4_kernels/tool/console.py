"""Terminal output of the commands: text, refusals, progress."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def console() -> Console:
    """Standard output; in a file or a pipe, a row stays on its line."""
    return Console(width=None if sys.stdout.isatty() else 200, highlight=False, soft_wrap=False)


@contextmanager
def refusals(*kinds: type[Exception]) -> Iterator[None]:
    """Prints an error of these kinds as one line, and ends the command with status 1."""
    try:
        yield
    except kinds as error:
        console().print(f"[red]{escape(str(error))}[/]")
        raise typer.Exit(1) from error


def progress_bar() -> Progress:
    """Progress bar with a count and the elapsed time, on standard error."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
