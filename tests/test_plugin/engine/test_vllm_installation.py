"""Commands without a usable vLLM: the remedy is to install vLLM, and no model is blamed."""

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
import typer

from tests import limits, without_vllm
from vllm_fp4_plugin.commands import command_line
from vllm_fp4_plugin.engine import vllm_installation
from vllm_fp4_plugin.engine.vllm_installation import UnusableVllm

NOT_INSTALLED = (
    "error: vllm: is not installed for {python}, must be version 0.32 or 0.33; install the extra "
    "`cuda` of vllm-fp4-plugin on a machine with a GPU, `cpu` on one without"
)
NO_DEVICE = (
    "vllm: version 0.33.0 finds no device to serve on: it is built for a GPU, and there is none "
    "here that its driver shows; report --arch, verify, quantize, catalogue and build work without"
)


def run(
    lacks: without_vllm.Lack, folder: Path, module: str, *arguments: object
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *map(str, arguments)]
    environment = without_vllm.environment(lacks, folder)
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=limits.PROCESS
    )


def ends(
    lacks: without_vllm.Lack, model: Path, folder: Path, *names: str
) -> dict[str, tuple[int | None, str]]:
    """Status and standard error of each command, without vLLM's warnings."""
    done = run(lacks, folder / "site", "tests.without_vllm", model, folder, *names)
    assert done.returncode == 0, done.stderr
    ended = json.loads(done.stdout.splitlines()[-1])
    assert [entry.name for entry in folder.iterdir()] == ["site"]
    return {name: (status, said) for name, (status, said) in ended.items()}


@pytest.mark.processes
def test_every_command_names_the_extra_to_install(bf16_checkpoint: Path, tmp_path: Path) -> None:
    each = ends("vllm", bf16_checkpoint, tmp_path)
    assert list(each) == list(without_vllm.commands("", ""))
    for name, (status, said) in each.items():
        assert status == 1, name
        [line] = said.splitlines()
        assert line.startswith(NOT_INSTALLED.format(python=sys.executable)), name


# The check takes seconds; all serving commands share it, so one stands for all.
@pytest.mark.processes
def test_a_gpu_s_build_without_a_gpu(bf16_checkpoint: Path, tmp_path: Path) -> None:
    """Planning works; serving names the remedy, and a report asks for ``--arch``."""
    plugin = "vllm_fp4_plugin"
    names = [f"{plugin} report", f"{plugin} report --arch", f"{plugin} verify", "examples.soak"]
    report, planned, verify, soak = ends("device", bf16_checkpoint, tmp_path, *names).values()
    assert report[0] == soak[0] == 1
    assert report[1].splitlines()[-1].startswith("error: arch: is not given, and vllm 0.33.0 finds")
    assert soak[1].splitlines()[-1].startswith(f"error: {NO_DEVICE}")
    assert planned[0] == verify[0] == 0, (planned, verify)


@pytest.mark.processes
def test_serving_without_a_gpu_ends_with_what_works(bf16_checkpoint: Path, tmp_path: Path) -> None:
    """The last line names the remedy; vLLM's own error mentions only a missing device type."""
    done = run("device", tmp_path / "site", "vllm.entrypoints.cli.main", "serve", bf16_checkpoint)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"nvfp4-tc: refused: {NO_DEVICE}")


@pytest.mark.parametrize(
    ("fault", "remedy"),
    [
        ("operator torchvision::nms does not exist", "`pip uninstall -y torchvision torchaudio"),
        ("undefined symbol: _ZN3c10", "install anew the extra `cuda`"),
    ],
)
def test_a_vllm_whose_dependencies_do_not_fit(
    fault: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unfit(types.ModuleType):
        def __getattr__(self, name: str) -> object:
            raise RuntimeError(fault)

    monkeypatch.setitem(sys.modules, "vllm.engine", Unfit("vllm.engine"))
    monkeypatch.delitem(sys.modules, "vllm.engine.arg_utils", raising=False)
    with pytest.raises(UnusableVllm, match=r"^vllm: .* cannot be imported \(") as refused:
        vllm_installation.check()
    assert remedy in str(refused.value)


def test_a_module_that_a_model_s_code_needs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), command_line.refusals("m"):
        raise ModuleNotFoundError("No module named 'einops'", name="einops")
    said = capsys.readouterr().err
    assert said.startswith("error: m: needs a module that cannot be imported here (No module name")
    assert "mend" not in said
