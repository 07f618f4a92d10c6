"""Ends of the examples' commands: one line in a fixed form, and a status for the reason."""

import runpy
import sys

import pytest
import torch

from examples.command_line import refusals
from examples.quantize import QuantizeError
from examples.server import ServerError

HERE = __file__
# Arguments that each command refuses by their values; one that the parser refuses by their form.
REFUSED = {
    "accuracy": ["measure", "/nowhere", "--text", "/nowhere", "--out", HERE],
    "accuracy.tasks": ["--out", HERE],
    "demo": ["--cache-dir", HERE],
    "kernel_bench": ["show", "/nowhere"],
    "kernel_bench.topk": [],
    "sensitivity": ["/nowhere", "--text", "/nowhere", "--out", HERE],
    "throughput": ["show", "/nowhere"],
    "train_llama": ["--out", HERE],
}


@pytest.mark.parametrize(
    "error", [ValueError("a [b]"), OSError("a [b]"), ServerError("a [b]"), QuantizeError("a [b]")]
)
def test_a_refusal_takes_one_line(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, refusals():
        raise error
    assert ended.value.code == 1
    assert capsys.readouterr() == ("", "error: a [b]\n")


@pytest.mark.parametrize("error", [RuntimeError("CUDA error"), KeyError("a"), AssertionError()])
def test_a_mistake_of_the_code_keeps_its_traceback(error: Exception) -> None:
    with pytest.raises(type(error)), refusals():
        raise error


def test_an_interrupted_run_says_what_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, refusals("rounds are kept"):
        raise KeyboardInterrupt
    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted; rounds are kept\n"


@pytest.fixture
def ending(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Function that runs a command without a GPU and returns its status and standard error."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # which commands set

    def run(name: str, *arguments: str) -> tuple[object, str]:
        monkeypatch.setattr(sys, "argv", ["command", *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(f"examples.{name}", run_name="__main__")
        return ended.value.code, capsys.readouterr().err

    return run


@pytest.mark.parametrize("name", REFUSED)
def test_every_command_refuses_alike(name: str, ending) -> None:
    status, said = ending(name, *REFUSED[name])
    assert status == 1
    assert said.startswith("error: ")
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("name", REFUSED)
def test_usage_is_told_by_the_parser(name: str, ending) -> None:
    assert ending(name, "--no-such-option")[0] == 2
