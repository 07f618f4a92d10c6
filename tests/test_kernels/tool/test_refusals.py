"""Errors of ``python -m nvfp4_kernels`` commands: one line on standard error, and a status."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from nvfp4_kernels.__main__ import app
from nvfp4_kernels.tool import shapes

LONG = "m" * 120  # more than a line of a narrow terminal


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["build", LONG, "--out", "kernels"], f"{LONG}: cannot be read"),
        (["build", "[/red]", "--out", "kernels"], "[/red]: cannot be read"),
        (["report", "--gate-up"], "--gate-up: goes with --shape; name one"),
        (["report", "--arch", "sm_90a"], "--arch: is 'sm_90a', must be one of sm_100 or sm_100a"),
        (["report", "--arch", "B200"], "--arch: is 'B200', must be one of sm_100 or sm_100a (B200"),
        (
            ["build", "--arch", "100a", "--linear", "64,64", "--out", "kernels"],
            "--arch: is '100a', must be one of sm_90 or sm_90a (H100, H200), sm_100 or sm_100a",
        ),
        (["check"], "check: this machine has no CUDA device, must have one of "),
    ],
    ids=lambda x: x[0] if isinstance(x, list) else "",
)
def test_refusal_is_one_line_and_a_status(
    arguments: Sequence[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith(f"error: {message}")
    assert not list(tmp_path.iterdir())


def test_lines_of_a_message_become_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("first line\nsecond line")

    monkeypatch.setattr(shapes, "given_shape", fail)
    done = CliRunner().invoke(app, ["report", "--shape", "1,64,64"])
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == "error: first line second line\n"


def test_a_command_line_that_is_not_understood() -> None:
    done = CliRunner().invoke(app, ["report", "--absent"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "No such option" in done.stderr
