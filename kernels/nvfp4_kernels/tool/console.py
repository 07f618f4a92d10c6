"""Terminal output of both packages' commands: text, tables, JSON, refusals, progress.

In a terminal, lines fill its width, and no word that fits on a line is broken or cut, in a table or
in a text. In a file or a pipe, lines have no maximum width, and ``COLUMNS`` is ignored.
"""

import ctypes
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

import typer
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

_UNBOUNDED = 100_000  # columns
_GAP = 2
_BORDERS, _BORDER = 3, 1  # of each column of a table, and at its end
# Columns that a text in a table takes at least; with less, a table is shown as records.
_LEGIBLE = 24


def width() -> int:
    """Maximum width of a line of standard output, in columns; unbounded unless a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else _UNBOUNDED


class Output(Console):
    """Console on standard output; prints a table that is too wide as records, one line per cell."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print like rich, but without breaking words in tables or text."""
        fitted = [self._fitted(each, options.get("markup")) for each in objects]
        super().print(*fitted, crop=False, no_wrap=True, overflow="ignore", **options)

    def _fitted(self, shown: Any, markup: bool | None) -> Any:
        if isinstance(shown, str):
            return _joined(_wrapped(self.render_str(shown, markup=markup), self.width))
        return self._table(shown) if isinstance(shown, Table) else shown

    def _table(self, table: Table) -> RenderableType:
        """Table with a title line and fixed column widths; records if the table is too wide."""
        title, table.title = table.title, None
        widths = self._widths(table.columns)
        if widths is None:
            shown: RenderableType = self._records(table)
        else:
            shown = table
            for column, given in zip(table.columns, widths, strict=True):
                column.width, column.overflow = given, "fold"
        return Group(self._fitted(title, None), shown) if title else shown

    def _records(self, table: Table) -> Text:
        """Rows of a table as records: each cell on a line, after its column's heading."""
        headings = [str(column.header) for column in table.columns]
        indent = max(map(len, headings)) + _GAP
        rows = [list(row) for row in zip(*(each.cells for each in table.columns), strict=True)]
        if table.show_footer:
            rows.append([column.footer for column in table.columns])
        lines: list[Text] = []
        for row in rows:
            for heading, cell in zip(headings, row, strict=True):
                if cell:
                    first, *rest = _wrapped(self.render_str(str(cell)), self.width - indent)
                    lines.append(Text(heading.ljust(indent)).append_text(first))
                    lines += [Text(" " * indent).append_text(line) for line in rest]
            lines.append(Text())
        return _joined(lines)

    def _widths(self, columns: Sequence[Column]) -> list[int] | None:
        """Column widths that keep all words whole; None if the table does not fit."""
        texts = [self._measured(column.cells) for column in columns]
        whole = [self._measured((each.header, *each.cells, each.footer)) for each in columns]
        room = self.width - _BORDERS * len(whole) - _BORDER
        floors = [
            max(each.minimum, min(text.maximum, _LEGIBLE))
            for each, text in zip(whole, texts, strict=True)
        ]
        if sum(floors) > room:
            return None
        widths = [each.maximum for each in whole]
        while sum(widths) > room:  # the widest of those that can be narrower
            excess = [width * (width > floor) for width, floor in zip(widths, floors, strict=True)]
            widths[excess.index(max(excess))] -= 1
        return widths

    def _measured(self, cells: Iterable[RenderableType]) -> Measurement:
        """Widths of the longest word and of the longest line in ``cells``."""
        found = [Measurement.get(self, self.options, cell) for cell in cells if cell]
        least, most = zip((0, 0), *found, strict=True)
        return Measurement(max(least), max(most))


def _wrapped(text: Text, room: int) -> list[Text]:
    """Lines of a text, broken only between words: a word longer than ``room`` stays whole."""
    lines: list[Text] = []
    for line in text.split("\n"):
        start, breaks = 0, []
        for word in re.finditer(r"\S+", line.plain):
            if word.end() - start > room and word.start() > start:
                breaks.append(start := word.start())
        lines += line.divide(breaks)
    for line in lines:
        line.rstrip()
    return lines


def _joined(lines: list[Text]) -> Text:
    return Text("\n").join(lines)


def output() -> Output:
    """Console for the output of a command."""
    return Output(width=width(), highlight=False)


def print_json(document: Any) -> None:
    """Print a command's output as one JSON document."""
    typer.echo(json.dumps(document, indent=1, ensure_ascii=False))


@contextmanager
def nothing_printed() -> Iterator[None]:
    """Context in which standard output, of Python and of C libraries, goes to standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)


def say(message: str) -> None:
    """Print a message about a command's input as one line on standard error."""
    Console(stderr=True).print(message, style="red", markup=False, highlight=False, soft_wrap=True)


def refusal(message: str) -> typer.Exit:
    """Print a refusal in one line; return the exception that ends the command with status 1."""
    say(f"error: {' '.join(message.splitlines())}")
    return typer.Exit(1)


@contextmanager
def refusals(*kinds: type[Exception]) -> Iterator[None]:
    """Context that turns errors of the types ``kinds`` into a refusal, which ends the command.

    Invalid command lines are reported by the parser, with status 2.
    """
    try:
        yield
    except kinds as error:
        raise refusal(str(error)) from error


def progress_bar() -> Progress:
    """Progress bar with a count and the elapsed time, on standard error."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
