"""Output of commands in a terminal and in a pipe."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

import pytest

from nvfp4_kernels.tool import console

NARROW = 80  # columns
# Variables that affect a process's output.
_LEFT_OUT = ("COLUMNS", "LINES", "FORCE_COLOR", "PYTHONUNBUFFERED")


def words(text: str) -> list[str]:
    """Words of an output, without the lines of tables."""
    return "".join(" " if "\u2500" <= each <= "\u257f" else each for each in text).split()


def narrow(monkeypatch: pytest.MonkeyPatch, columns: int = NARROW) -> None:
    """Make commands of this process print as in a terminal of ``columns`` columns."""
    monkeypatch.setattr(console, "width", lambda: columns)


def shown_by_a_terminal(module: str, *arguments: str, columns: int = NARROW) -> str:
    """Output of a command in a terminal of ``columns`` columns, run in a separate process."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    started = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=theirs, stdout=theirs, stderr=subprocess.STDOUT, env=environment(),
    )  # fmt: skip
    os.close(theirs)
    found = b""
    try:
        while part := os.read(ours, 4096):
            found += part
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert started.wait() == 0, found.decode()
    return found.decode().replace("\r\n", "\n")


def environment() -> dict[str, str]:
    """Environment with this process's module paths and without variables that affect the output."""
    path = os.pathsep.join(each for each in sys.path if each)
    kept = {name: value for name, value in os.environ.items() if name not in _LEFT_OUT}
    return kept | {"PYTHONPATH": path, "NO_COLOR": "1"}


def check_no_word_is_broken(piped: str, narrow: str) -> None:
    """Check that a narrow terminal shows every word of the piped output, in lines that fit."""
    assert set(words(piped)) <= set(words(narrow)), set(words(piped)) - set(words(narrow))
    long = [line for line in narrow.splitlines() if len(line) > NARROW]
    # Only a word longer than a line may exceed the width.
    assert not [line for line in long if max(map(len, words(line))) < NARROW // 2], long
