"""``doctor``: every obstacle to ``vllm serve`` is found and reported with its remedy."""

import re
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from vllm_fp4_plugin import versions
from vllm_fp4_plugin.__main__ import app
from vllm_fp4_plugin.commands import diagnosis, tried
from vllm_fp4_plugin.commands.diagnosis import Finding, Gpu
from vllm_fp4_plugin.engine import vllm_installation
from vllm_fp4_plugin.engine.vllm_installation import UnusableVllm

Break = Callable[[pytest.MonkeyPatch, Path], None]

LINES = [
    "plugin", "vLLM", "torch", "CUDA", "driver", "GPU", "CuTe DSL", "FlashInfer", "cache", "memory",
    "tried",
]  # fmt: skip
GIB = 1 << 30
H200 = Gpu("NVIDIA H200", "sm_90", 139 * GIB, 140 * GIB)
B200 = Gpu("NVIDIA B200", "sm_100", 179 * GIB, 180 * GIB)


def found(about: str) -> Finding:
    return next(each for each in diagnosis.findings() if each.about == about)


def test_all_is_well_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NVFP4_KERNELS_CACHE", str(tmp_path / "kernels"))
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0, done.output
    assert [each.about for each in diagnosis.findings()] == LINES
    assert [row.split("│")[1].strip() for row in done.output.splitlines() if "│" in row] == LINES
    assert found("GPU").note.startswith("none: vLLM's CPU build serves")
    assert re.fullmatch(r"\d+\.\d of \d+\.\d GiB free", found("memory").note)
    assert found("cache").note == f"{tmp_path / 'kernels'}, which is not made yet"
    (tmp_path / "kernels").mkdir(mode=0o700)
    assert found("cache").note == f"{tmp_path / 'kernels'} holds 0 compiled kernels"
    monkeypatch.setenv("NVFP4_KERNELS_CACHE", "")
    assert found("cache").note == "no kernels are kept: NVFP4_KERNELS_CACHE is empty"


# --- on a CPU -----------------------------------------------------------------------------------


def no_entry_point(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(diagnosis, "entry_points", lambda group: metadata.EntryPoints())


def not_loaded(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "lora_filesystem_resolver")


def vllm_that_fails(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def check() -> None:
        raise UnusableVllm("vllm: cannot be imported")

    monkeypatch.setattr(vllm_installation, "check", check)


def open_folder(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    folder.chmod(0o777)
    monkeypatch.setenv("NVFP4_KERNELS_CACHE", str(folder))


def file_for_a_folder(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "file").touch()
    monkeypatch.setenv("NVFP4_KERNELS_CACHE", str(folder / "file" / "kernels"))


def folder_of_others(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("NVFP4_KERNELS_CACHE", str(folder / "kernels"))
    monkeypatch.setattr(diagnosis.os, "access", lambda path, mode: False)  # root may write anywhere


def no_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr("nvfp4_kernels.tool.toolchain.find_spec", lambda name: None)


def no_proc(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def read(node: int) -> None:
        raise FileNotFoundError("no /proc/meminfo")

    monkeypatch.setattr("vllm_fp4_plugin.engine.host_memory.read", read)


@pytest.mark.parametrize(
    ("breaks", "about", "verdict", "said"),
    [
        (no_entry_point, "plugin", "wrong", "no entry point nvfp4_tc in vllm.general_pl"),
        (
            not_loaded,
            "plugin",
            "wrong",
            "VLLM_PLUGINS is 'lora_filesystem_resolver', must name",
        ),
        (vllm_that_fails, "vLLM", "wrong", "vllm: cannot be imported"),
        (no_compiler, "CuTe DSL", "unknown", "nvidia-cutlass-dsl and apache-tvm-ffi.*; needed on"),
        (open_folder, "cache", "wrong", "everybody may write to .*, mode 777"),
        (file_for_a_folder, "cache", "wrong", "file is no folder, must be one; name another"),
        (
            folder_of_others,
            "cache",
            "unknown",
            "cannot be written to, .*; build the model",
        ),
        (no_proc, "memory", "unknown", "no /proc/meminfo.*; name the cache's: --kv-cache-memory-b"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_wrong(
    breaks: Break,
    about: str,
    verdict: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    breaks(monkeypatch, tmp_path)
    [only] = [each for each in diagnosis.findings() if each.verdict != "ok"]
    assert (only.about, only.verdict) == (about, verdict)
    assert re.search(said, only.note), only.note
    assert CliRunner().invoke(app, ["doctor"]).exit_code == (verdict == "wrong")


def test_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing vLLM is the only fault: GPUs are not checked before vLLM is installed."""

    def check() -> None:
        raise UnusableVllm("vllm: is not installed")

    monkeypatch.setattr(vllm_installation, "check", check)
    monkeypatch.setattr(versions, "vllm_version", lambda: "")
    assert [each.about for each in diagnosis.findings()] == LINES
    assert [each.about for each in diagnosis.findings() if each.verdict == "wrong"] == ["vLLM"]


# --- on a GPU -----------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Function that makes this machine appear to have healthy GPUs, except as its arguments say."""

    def become(
        *gpus: Gpu, vllm: str = "0.33.0", of_torch: str = "2.14.0", cuda: str | None = "13.0",
        driver: int = 13010, dsl: str = "4.8.0", flashinfer: str = "0.7.2",
    ) -> None:  # fmt: skip
        installed = {"nvidia-cutlass-dsl": dsl, "flashinfer-python": flashinfer, "torch": of_torch}
        monkeypatch.setattr(vllm_installation, "check", lambda: None)
        monkeypatch.setattr(versions, "vllm_version", lambda: vllm)
        monkeypatch.setattr(tried, "vllm_version", lambda: vllm)
        for module in (versions, tried):
            monkeypatch.setattr(module, "installed", lambda name: installed.get(name, ""))
        monkeypatch.setattr(torch, "__version__", of_torch)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(diagnosis, "driver_version", lambda: driver)
        monkeypatch.setattr(diagnosis, "gpus", lambda: list(gpus))

    return become


def test_a_gpu_with_all_it_needs(machine: Callable[..., None]) -> None:
    machine(H200, H200)
    verdicts = {each.about: each.verdict for each in diagnosis.findings()}
    assert verdicts == dict.fromkeys(LINES, "ok") | {"tried": "unknown"}
    assert found("tried").note.endswith(": pip resolves it")
    assert found("GPU").note == "NVIDIA H200 (sm_90); NVIDIA H200 (sm_90)"
    assert found("driver").note == "serves CUDA 13.1"
    assert found("memory").note == "139.0 of 140.0 GiB free; 139.0 of 140.0 GiB free"


@pytest.mark.parametrize(
    ("gpus", "given", "about", "verdict", "said"),
    [
        (
            [H200],
            {"vllm": "0.34.0"},
            "vLLM",
            "unknown",
            "0.34.0, the plugin is written for 0.3",
        ),
        (
            [H200],
            {"of_torch": "2.12.0"},
            "torch",
            "unknown",
            "2.12.0; with vllm 0.33.0 tried: ",
        ),
        ([H200], {"cuda": None}, "CUDA", "wrong", "is built for CPUs, must be for GPUs.*; install"),
        (
            [H200],
            {"cuda": "13.2"},
            "CUDA",
            "unknown",
            "torch is built for 13.2; tried: 13.0; in",
        ),
        (
            [H200],
            {"driver": 12090},
            "driver",
            "wrong",
            "serves CUDA 12.9, .* 13.0; install",
        ),
        ([], {}, "GPU", "wrong", "none that torch finds; mend the driver"),
        (
            [H200._replace(arch="sm_120")],
            {},
            "GPU",
            "wrong",
            r"no kernels for sm_120, .*\(H100, H200",
        ),
        ([B200], {}, "GPU", "unknown", "on no chip; first run nvfp4-kernels check --quick"),
        ([H200], {"dsl": "4.9.0"}, "CuTe DSL", "unknown", "4.9.0 was not tried; .*dsl==4.8.0"),
        (
            [H200],
            {"flashinfer": ""},
            "FlashInfer",
            "unknown",
            "not installed; .*pip install",
        ),
        (
            [H200, H200._replace(free=70 * GIB)],
            {},
            "memory",
            "wrong",
            "70.0 of 140.0 GiB free, vLLM takes 92% of each; .*--gpu-memory-utilization 0.5$",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_what_is_wrong_on_a_gpu(
    gpus: list[Gpu],
    given: dict[str, str],
    about: str,
    verdict: str,
    said: str,
    machine: Callable[..., None],
) -> None:
    machine(*gpus, **given)
    line = found(about)
    assert line.verdict == verdict
    assert re.search(said, line.note), line.note
    assert CliRunner().invoke(app, ["doctor"]).exit_code == (verdict == "wrong")


def test_without_a_driver(machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> int:
        raise RuntimeError("CUDA driver: its version is unknown (100); install one")

    machine(H200)
    monkeypatch.setattr(diagnosis, "driver_version", no_driver)
    assert found("driver").verdict == "wrong"


def test_a_gpu_that_does_not_answer(
    machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gpus() -> list[Gpu]:
        raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy\nand more")

    machine()
    monkeypatch.setattr(diagnosis, "gpus", gpus)
    assert found("GPU").note.startswith("CUDA error: CUDA-capable device(s) is/are busy; end oth")
    assert [found(about).verdict for about in ("GPU", "memory")] == ["wrong", "unknown"]


def test_without_a_compiler(machine: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    machine(H200)
    no_compiler(monkeypatch, Path())
    assert found("CuTe DSL").verdict == "wrong"


def test_versions_that_nobody_tried(machine: Callable[..., None]) -> None:
    machine(H200, of_torch="2.12.0")
    assert found("tried").verdict == "unknown"
    assert "not tried; nearest tried" in found("tried").note
