"""``doctor``: each thing that keeps ``vllm serve`` from starting is found, with its remedy."""

import re
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_fp4_plugin.__main__ import app
from vllm_fp4_plugin.commands import doctor
from vllm_fp4_plugin.engine import vllm_installation
from vllm_fp4_plugin.engine.vllm_installation import UnusableVllm

Break = Callable[[pytest.MonkeyPatch, Path], None]


def found(about: str) -> doctor.Finding:
    return next(each for each in doctor.findings() if each.about == about)


def test_all_is_well_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NVFP4_KERNELS_CACHE", str(tmp_path / "kernels"))
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0, done.output
    assert found("serve").said == "on cpu, with everything else"
    assert "which is not made yet" in found("kernels").said
    (tmp_path / "kernels").mkdir(mode=0o700)
    assert found("kernels").said.startswith("0 kept in ")
    monkeypatch.setenv("NVFP4_KERNELS_CACHE", "")
    assert found("kernels").said == "none are kept: NVFP4_KERNELS_CACHE is empty"


def no_vllm(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def check() -> None:
        raise UnusableVllm("vllm: is not installed")

    monkeypatch.setattr(vllm_installation, "check", check)


def no_entry_point(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(doctor, "entry_points", lambda group: metadata.EntryPoints())


def not_loaded(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "lora_filesystem_resolver")


def open_folder(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    folder.chmod(0o777)
    monkeypatch.setenv("NVFP4_KERNELS_CACHE", str(folder))


def no_compiler_on_a_gpu(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr("nvfp4_kernels.tool.toolchain.find_spec", lambda name: None)
    monkeypatch.setattr("vllm_fp4_plugin.versions.vllm_version", lambda: "0.33.0")


def another_gpu(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(doctor, "device_arch", lambda device: "sm_120")


@pytest.mark.parametrize(
    ("breaks", "about", "said"),
    [
        (no_vllm, "serve", "vllm: is not installed"),
        (another_gpu, "serve", r"sm_120 has no kernels of ours, only sm_90 \(H100, H200\), sm_100"),
        (no_entry_point, "plugin", "no entry point nvfp4_tc in vllm.general_plugins; install the"),
        (not_loaded, "plugin", "VLLM_PLUGINS is 'lora_filesystem_resolver', must name nvfp4_tc"),
        (
            no_compiler_on_a_gpu,
            "build",
            "nvidia-cutlass-dsl and apache-tvm-ffi.*; needed on",
        ),
        (open_folder, "kernels", "everybody may write to .*, mode 777"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_wrong(
    breaks: Break, about: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    breaks(monkeypatch, tmp_path)
    wrong = [each for each in doctor.findings() if not each.is_well]
    assert [each.about for each in wrong] == [about]
    assert re.search(said, wrong[0].said), wrong[0].said
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 1
