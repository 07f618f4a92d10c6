"""Terminal output of the commands: text, refusals, progress."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def console() -> Console:
    """Standard output; in a file or a pipe, a row stays on its line."""
    return Console(width=None if sys.stdout.isatty() else 200, highlight=False, soft_wrap=False)


@contextmanager
def refusals(*kinds: type[Exception]) -> Iterator[None]:
    """Print an error of these kinds as one line on standard error; end the command with 1.

    What the command line itself has wrong is the parser's to tell, with 2.
    """
    try:
        yield
    except kinds as error:
        line = " ".join(str(error).splitlines())
        Console(stderr=True).print(
            f"error: {line}", style="red", markup=False, highlight=False, soft_wrap=True
        )
        raise typer.Exit(1) from error


def progress_bar() -> Progress:
    """Progress bar with a count and the elapsed time, on standard error."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
