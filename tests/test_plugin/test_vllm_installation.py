"""Commands without a vLLM that runs here: the remedy is to install one; no model is at fault."""

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
import typer

from tests import limits, without_vllm
from vllm_fp4_plugin import command_line, vllm_installation
from vllm_fp4_plugin.vllm_installation import UnusableVllm

REMEDIES = {
    "vllm": "error: vllm: is not installed for {python}, must be version 0.32; install the extra "
    "`cuda` of vllm-fp4-plugin on a machine with a GPU, `cpu` on one without",
    "device": "error: vllm: version 0.32.0 finds no device to run on: it is built for a GPU, and "
    "there is none here that its driver shows; install the extra `cpu`",
}


# Of a vLLM that is not there all commands; the other check takes seconds, and is asked for alike.
SOME = ["vllm_fp4_plugin report", "vllm_fp4_plugin verify", "examples.soak"]


@pytest.mark.processes
@pytest.mark.parametrize("lacks", REMEDIES)
def test_every_command_names_the_extra_to_install(
    lacks: without_vllm.Lack, bf16_checkpoint: Path, tmp_path: Path
) -> None:
    named = [] if lacks == "vllm" else SOME
    command = [sys.executable, "-m", "tests.without_vllm", bf16_checkpoint, tmp_path, *named]
    environment = without_vllm.environment(lacks, tmp_path / "site")
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=limits.PROCESS, check=True
    )
    each = json.loads(done.stdout.splitlines()[-1])
    assert list(each) == (named or list(without_vllm.commands("", "")))
    for name, (status, said) in each.items():
        assert status == 1, name
        [line] = said.splitlines()
        assert line.startswith(REMEDIES[lacks].format(python=sys.executable)), name
    assert [entry.name for entry in tmp_path.iterdir()] == ["site"]


def test_a_vllm_whose_dependencies_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unfit(types.ModuleType):
        def __getattr__(self, name: str) -> object:
            raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setitem(sys.modules, "vllm.engine", Unfit("vllm.engine"))
    monkeypatch.delitem(sys.modules, "vllm.engine.arg_utils", raising=False)
    with pytest.raises(UnusableVllm, match=r"^vllm: .* cannot be imported \(.*; install anew the"):
        vllm_installation.check()


def test_a_module_that_a_model_s_code_needs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), command_line.refusals("m"):
        raise ModuleNotFoundError("No module named 'einops'", name="einops")
    said = capsys.readouterr().err
    assert said.startswith("error: m: needs a module that cannot be imported here (No module name")
    assert "mend" not in said
