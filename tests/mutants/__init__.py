"""Mutants: code broken on purpose, which a test must notice."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from tests.emulator.findings import EmulatorError

Patch = Callable[[pytest.MonkeyPatch], None]
Check = Callable[[], object]

WRONG = "wrong numbers"  # an assertion fails
FINDING = "finding"  # any finding of the emulator
ANYTHING = ""  # which of several findings comes first depends on the schedule


@dataclass(frozen=True)
class Mutant:
    """Code broken on purpose, and how a test must notice it.

    Attributes:
        change: function that breaks the code: of a ``MonkeyPatch``, of the right text, or of a
            schedule, in which it launches wrong kernels.
        caught: class name of the finding, ``WRONG``, ``FINDING`` or ``ANYTHING``.
        on: case or tests that expose the mutant.
        match: pattern of the finding's message.
    """

    change: Callable[[Any], Any]
    caught: str = WRONG
    on: Any = None
    match: str = ""

    @classmethod
    def replaced(cls, owner: object, name: str, value: object, on: Any = None) -> "Mutant":
        """Mutant with another value of ``owner``'s attribute ``name``, and wrong results."""
        return cls(lambda patch: patch.setattr(owner, name, value), WRONG, on)

    @classmethod
    def edited(cls, right: str, wrong: str, caught: str, match: str, on: Any = None) -> "Mutant":
        """Mutant of a text in which ``right``, which occurs once, becomes ``wrong``."""
        return cls(lambda text: edited(text, right, wrong), caught, on, match)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Context of the patched code."""
        with pytest.MonkeyPatch.context() as patch:
            self.change(patch)
            yield

    def check(self, found: BaseException | None) -> None:
        """Assert that ``found``, returned by ``noticed``, is the finding that the mutant causes."""
        assert found is not None, "nobody has noticed the mutant"
        is_finding = isinstance(found, EmulatorError)
        kinds = (type(found).__name__, FINDING) if is_finding else (WRONG,)
        assert self.caught in (*kinds, ANYTHING), f"{kinds[0]} for {self.caught}: {found}"
        assert re.search(self.match, str(found)), f"no {self.match!r} in {found}"


def edited(text: str, right: str, wrong: str) -> str:
    """Replace ``right``, which must occur once, by ``wrong``."""
    assert text.count(right) == 1, f"{right!r} occurs {text.count(right)} times"
    assert right != wrong
    return text.replace(right, wrong)


def noticed(check: Check) -> BaseException | None:
    """The failed assertion or the emulator's finding that ``check`` raises; None if it passes."""
    try:
        check()
    except (AssertionError, pytest.fail.Exception, EmulatorError) as found:
        return found.with_traceback(None)  # frames would keep arrays
    return None
