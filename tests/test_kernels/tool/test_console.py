"""Output of commands: tables with whole words, or records if the terminal is too narrow."""

import subprocess
import sys

import pytest
from rich.table import Table

from nvfp4_kernels.tool import console
from tests import terminal

KERNEL = "nvfp4_silu_mul_gemm_w4a16/reference"
WHY = "activations stay in 16 bits, as the checkpoint is weight-only"


def table(*rows: tuple[str, ...], footer: bool = False) -> Table:
    made = Table(title="Kernels of a model", show_footer=footer)
    for name in ("layer", "kernel", "why"):
        made.add_column(name, footer="all" if name == "layer" else "")
    for row in rows:
        made.add_row(*row)
    return made


def printed(shown: object, capsys: pytest.CaptureFixture[str]) -> list[str]:
    console.output().print(shown)
    return capsys.readouterr().out.splitlines()


def test_a_table_takes_what_room_there_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = ("qkv_proj", KERNEL, WHY)
    piped = printed(table(row), capsys)
    for columns in range(82, 140):
        terminal.narrow(monkeypatch, columns)
        lines = printed(table(row), capsys)
        assert max(map(len, lines)) <= columns
        assert lines[0] == "Kernels of a model"
        assert lines[1].startswith("┏")
        assert sorted(terminal.words("\n".join(lines))) == sorted(terminal.words("\n".join(piped)))


def test_a_table_without_room_becomes_records(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal.narrow(monkeypatch, 60)
    lines = printed(table(("qkv_proj", KERNEL, WHY), ("o_proj", KERNEL, ""), footer=True), capsys)
    assert lines == [
        "Kernels of a model",
        "layer   qkv_proj",
        f"kernel  {KERNEL}",
        "why     activations stay in 16 bits, as the checkpoint is",
        "        weight-only",
        "",
        "layer   o_proj",
        f"kernel  {KERNEL}",
        "",
        "layer   all",
        "",
    ]


@pytest.mark.parametrize("columns", [10, 30])
def test_a_word_that_is_too_long_stays_whole(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal.narrow(monkeypatch, columns)
    assert printed(f"a {KERNEL} b", capsys) == ["a", KERNEL, "b"]
    assert f"kernel  {KERNEL}" in printed(table(("o_proj", KERNEL, "")), capsys)


def test_a_pipe_has_no_width(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    text = " ".join([WHY] * 20)
    assert printed(text, capsys) == [text]
    assert f"│ o_proj │ {text} │     │" in printed(table(("o_proj", text, "")), capsys)


@pytest.mark.processes
def test_only_a_document_is_printed() -> None:
    """Output of libraries, from Python, C or a child process, goes to standard error."""
    code = """
import ctypes, subprocess
from nvfp4_kernels.tool.console import nothing_printed, print_json
with nothing_printed():
    print("python")
    ctypes.CDLL(None).puts(b"in C")
    subprocess.run(["echo", "a process"])
print_json({"name": "×"})
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=terminal.environment(),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == '{\n "name": "×"\n}\n'
    assert sorted(done.stderr.splitlines()) == ["a process", "in C", "python"]
