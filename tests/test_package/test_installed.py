"""Installed wheel, which works without the checkout.

The environment is fresh except for its dependencies, which come from the environment of the tests.
"""

import json
import sys
import venv
from pathlib import Path

import pytest

import vllm_fp4_plugin
from tests import tiny_llama
from tests.test_package.building import run
from vllm_fp4_plugin.engine import platform

pytestmark = pytest.mark.slow

PACKAGE_FOLDERS = ("site-packages", "dist-packages")
# One process runs `python -m vllm_fp4_plugin` and prints the loaded modules: importing vLLM is
# slow.
RUN_PLUGIN = """
import contextlib, json, runpy, sys
from importlib.metadata import distribution

from vllm.plugins import load_general_plugins

load_general_plugins()
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
from vllm.platforms import current_platform

status = 0
try:
    runpy.run_module("vllm_fp4_plugin", run_name="__main__", alter_sys=True)
except SystemExit as end:
    status = end.code
installed = distribution("vllm-fp4-plugin")
packages = [sys.modules[name] for name in ("nvfp4_kernels", "vllm_fp4_plugin")]
platform = type(current_platform)
print(json.dumps({
    "files": [*(each.__file__ for each in packages), str(installed.locate_file("."))],
    "version": installed.version,
    "methods": QUANTIZATION_METHODS,
    "platform": f"{platform.__module__}.{platform.__qualname__}",
}))
sys.exit(status)
"""


@pytest.fixture(scope="session")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Virtual environment with the wheel installed."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    done = run(*pip, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    assert done.returncode == 0, done.stderr
    # Written after the install, or pip would find this project installed already. Files named *.pth
    # in folders that such a file names are not read, so the checkout's editable install stays
    # hidden.
    folders = [path for path in sys.path if set(PACKAGE_FOLDERS) & set(Path(path).parts)]
    (site_packages,) = folder.glob("lib/python3.*/site-packages")
    (site_packages / "dependencies.pth").write_text("\n".join(folders))
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.save(tmp_path_factory.mktemp("model"))


def test_report_of_a_model(environment: Path, model: Path, tmp_path: Path) -> None:
    """The plugins are found by their entry points, and every loaded file belongs to the wheel."""
    python = environment / "bin" / "python"
    done = run(python, "-c", RUN_PLUGIN, "report", model, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for layer in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "attn"):
        assert layer in done.stdout
    found = json.loads(done.stdout.splitlines()[-1])
    assert all(Path(file).is_relative_to(environment) for file in found["files"]), found["files"]
    assert found["version"] == vllm_fp4_plugin.__version__
    assert "nvfp4-tc" in found["methods"]
    of_ours = platform.activate()
    assert of_ours in (found["platform"], None)  # None: not vLLM's CPU build


def test_kernels_tool(environment: Path, tmp_path: Path) -> None:
    python = environment / "bin" / "python"
    done = run(python, "-m", "nvfp4_kernels", "report", "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Usage: python -m nvfp4_kernels report" in done.stdout


@pytest.mark.parametrize(
    ("script", "commands"),
    [("nvfp4-tc", ("quantize", "report")), ("nvfp4-kernels", ("build", "report", "check"))],
)
def test_console_script(
    script: str, commands: tuple[str, ...], environment: Path, tmp_path: Path
) -> None:
    done = run(environment / "bin" / script, "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"Usage: {script} " in done.stdout
    for command in commands:
        assert command in done.stdout
