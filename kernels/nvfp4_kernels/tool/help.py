"""Help texts of both packages' commands, in plain text that breaks no name, option or word.

typer's own panels cut names at the terminal's width, and pad lines to that width in a pipe.
"""

import textwrap
from collections.abc import Iterator, Sequence
from inspect import cleandoc
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from nvfp4_kernels.tool import console

_LONGEST = 26  # name that shares a line with its help
_INDENT, _GAP = 2, 2
_NARROWEST = 24  # columns of a text, however narrow the terminal is

_HEADINGS = {"argument": "Arguments", "option": "Options"}


class _Plain:
    """Mixin that prints the usage and help of a command, or of a group, as plain text."""

    def get_usage(self: Any, ctx: Any) -> str:
        return " ".join(["Usage:", ctx.command_path, *self.collect_usage_pieces(ctx)])

    def format_help(self: Any, ctx: Any, formatter: Any) -> None:
        parts = [self.get_usage(ctx), *_paragraphs(self.help)]
        for kind, heading in _HEADINGS.items():
            params = [each for each in self.get_params(ctx) if each.param_type_name == kind]
            records = [each.get_help_record(ctx) for each in params]
            # Bounds are told behind the help.
            shown = [(name.replace(" range>", ">"), text) for name, text in filter(None, records)]
            parts += _section(heading, shown)
        commands = self.list_commands(ctx) if isinstance(self, TyperGroup) else []
        summaries = [next(_paragraphs(self.get_command(ctx, name).help)) for name in commands]
        parts += _section("Commands", list(zip(commands, summaries, strict=True)))
        formatter.write("\n\n".join(parts))


class Command(_Plain, TyperCommand):
    """Command with plain-text help."""


class Group(_Plain, TyperGroup):
    """Group of commands with plain-text help."""


def application(text: str) -> typer.Typer:
    """Make an empty application with help ``text``; add commands with ``command(cls=Command)``."""
    return typer.Typer(
        cls=Group, help=text, no_args_is_help=True, add_completion=False, rich_markup_mode=None
    )


def _paragraphs(text: str | None) -> Iterator[str]:
    """Paragraphs of a docstring, re-wrapped, as the source's line breaks mean nothing."""
    for paragraph in cleandoc(text or "").split("\n\n"):
        if paragraph:
            yield "\n".join(_wrapped(" ".join(paragraph.split()), 0))


def _section(heading: str, records: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Help section: a heading, then each name with its help; empty if ``records`` is empty."""
    if not records:
        return
    longest = max((len(name) for name, _ in records if len(name) <= _LONGEST), default=0)
    column = _INDENT + longest + _GAP
    lines = [f"{heading}:"]
    for name, text in records:
        first, *rest = [" " * column + line for line in _wrapped(text, column)]
        named = " " * _INDENT + name
        if len(name) > longest:
            lines += [named, first]
        else:
            lines.append(named + first[len(named) :])
        lines += rest
    yield "\n".join(lines)


def _wrapped(text: str, indent: int) -> list[str]:
    """Lines of an indented text, broken only between words."""
    room = max(console.width() - indent - 1, _NARROWEST)
    return textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""]
