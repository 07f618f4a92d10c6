"""Help of both programs: whole words in a terminal, no width in a pipe, no import of torch."""

import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from nvfp4_kernels.__main__ import app as kernels
from nvfp4_kernels.tool import help
from tests import terminal
from vllm_fp4_plugin.__main__ import app as plugin

PROGRAMS = {"nvfp4_kernels": kernels, "vllm_fp4_plugin": plugin}
# Each program, and each of its commands.
HELP = [
    pytest.param(name, arguments, id=" ".join([name, *arguments]))
    for name, app in PROGRAMS.items()
    for arguments in ([], *([each] for each in typer.main.get_command(app).commands))  # type: ignore[attr-defined]
]
HEAVY = ("torch", "vllm", "cutlass", "transformers", "huggingface_hub")

MODULES = """
import json, runpy, sys

module, *arguments = sys.argv[1:]
sys.argv = [module, *arguments, "--help"]
try:
    runpy.run_module(module, run_name="__main__", alter_sys=True)
except SystemExit as end:
    assert end.code == 0, end.code
print(json.dumps([*sys.modules]))
"""


def helped(name: str, *arguments: str, columns: int = 80) -> str:
    """Help in a pipe, with ``COLUMNS`` set."""
    env = {"COLUMNS": str(columns)}
    done = CliRunner().invoke(PROGRAMS[name], [*arguments, "--help"], env=env)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize(("name", "arguments"), HELP)
def test_no_word_is_broken(
    name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    piped = helped(name, *arguments)
    for columns in range(terminal.NARROW - 20, terminal.NARROW + 21):
        terminal.narrow(monkeypatch, columns)
        narrow = helped(name, *arguments)
        assert terminal.words(narrow) == terminal.words(piped)
        assert max(map(len, narrow.splitlines())) <= columns


@pytest.mark.parametrize(("name", "arguments"), HELP)
def test_every_option_is_there_and_a_flag_takes_no_value(name: str, arguments: list[str]) -> None:
    command = typer.main.get_command(PROGRAMS[name])
    for argument in arguments:
        command = command.commands[argument]  # type: ignore[attr-defined]
    lines = helped(name, *arguments).splitlines()
    for option in [each for each in command.params if each.param_type_name == "option"]:
        names = " / ".join([*option.opts, *option.secondary_opts])
        [line] = [each for each in lines if f"{each.strip()} ".startswith(f"{names} ")]
        value = line.strip().removeprefix(names).partition("  ")[0].strip()
        assert bool(value) != option.is_flag, line  # type: ignore[attr-defined]
    assert "<bool>" not in "\n".join(lines)


@pytest.mark.parametrize(("name", "arguments"), HELP)
def test_a_pipe_has_no_width(name: str, arguments: list[str]) -> None:
    narrow, wide = (helped(name, *arguments, columns=columns) for columns in (40, 300))
    assert narrow == wide


@pytest.mark.processes
@pytest.mark.parametrize(("name", "command"), [("nvfp4_kernels", "build"), ("vllm_fp4_plugin", "")])
def test_a_terminal_is_shown_the_same(name: str, command: str) -> None:
    """Help in a real terminal of 80 columns has the same words."""
    arguments = [command] if command else []
    narrow = terminal.shown_by_a_terminal(name, *arguments, "--help")
    piped = helped(name, *arguments).replace("Usage: root", f"Usage: python -m {name}")
    assert terminal.words(narrow)[4:] == terminal.words(piped)[4:]
    terminal.check_no_word_is_broken("", narrow)
    assert max(map(len, narrow.splitlines())) > terminal.NARROW * 3 // 4


@pytest.mark.processes
@pytest.mark.parametrize(("name", "arguments"), HELP)
def test_help_waits_for_no_library(name: str, arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MODULES, name, *arguments],
        env=terminal.environment(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    modules = set(json.loads(done.stdout.splitlines()[-1]))
    assert not modules & set(HEAVY)


@pytest.mark.parametrize(
    ("names", "lines"),
    [
        (["--a"], ["  --a  one two"]),
        (["--a", "--long <str>"], ["  --a           one two", "  --long <str>  one two"]),
        (["--a", "--name-that-is-too-long <str>"],
         ["  --a  one two", "  --name-that-is-too-long <str>", "       one two"]),
        (["--name-that-is-too-long <str>"], ["  --name-that-is-too-long <str>", "    one two"]),
    ],
)  # fmt: skip
def test_long_names_take_a_line(names: list[str], lines: list[str]) -> None:
    [section] = help._section("Options", [(name, "one two") for name in names])
    assert section.splitlines() == ["Options:", *lines]
