"""The wheel, installed: all of it works without the checkout.

The environment is fresh but for its dependencies, which it finds in the one that runs the tests.
"""

import json
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import vllm_fp4_plugin
from tests import tiny_llama
from tests.test_package.conftest import clean_environment

pytestmark = pytest.mark.slow

LIMIT = 120
PACKAGE_FOLDERS = ("site-packages", "dist-packages")
LOAD_PLUGINS = """
import json
from importlib.metadata import distribution

import nvfp4_kernels
import vllm_fp4_plugin
from vllm_fp4_plugin.platform import activate
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins

load_general_plugins()
installed = distribution("vllm-fp4-plugin")
platform = type(current_platform)
print(json.dumps({
    "files": [nvfp4_kernels.__file__, vllm_fp4_plugin.__file__, str(installed.locate_file("."))],
    "version": installed.version,
    "methods": QUANTIZATION_METHODS,
    "platform": f"{platform.__module__}.{platform.__qualname__}",
    "platform_of_ours": activate(),
}))
"""


@pytest.fixture(scope="session")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel in it."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    done = run(*pip, "install", "--no-deps", "--no-index", str(wheel), cwd=folder)
    assert done.returncode == 0, done.stderr
    # Only now, or pip would find this project installed already. Files named *.pth in folders that
    # such a file names are not read, so the checkout's editable install stays out of sight.
    folders = [path for path in sys.path if set(PACKAGE_FOLDERS) & set(Path(path).parts)]
    (site_packages,) = folder.glob("lib/python3.*/site-packages")
    (site_packages / "dependencies.pth").write_text("\n".join(folders))
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.save(tmp_path_factory.mktemp("model"))


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(each) for each in command],
        cwd=cwd,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def test_vllm_finds_the_plugins(environment: Path, tmp_path: Path) -> None:
    done = run(environment / "bin" / "python", "-c", LOAD_PLUGINS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert all(Path(file).is_relative_to(environment) for file in found["files"]), found["files"]
    assert found["version"] == vllm_fp4_plugin.__version__
    assert "nvfp4-tc" in found["methods"]
    assert found["platform_of_ours"] in (found["platform"], None)  # None: not vLLM's CPU build


def test_report_of_a_model(environment: Path, model: Path, tmp_path: Path) -> None:
    python = environment / "bin" / "python"
    done = run(python, "-m", "vllm_fp4_plugin", "report", model, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for layer in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "attn"):
        assert layer in done.stdout


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
