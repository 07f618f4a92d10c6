"""Output of ``python -m nvfp4_kernels --version``."""

from importlib.metadata import PackageNotFoundError, version

import pytest
from typer.testing import CliRunner

from nvfp4_kernels.__main__ import app
from nvfp4_kernels.tool import version_option


def test_a_line_for_each_distribution() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[:2] == [
        f"nvfp4_kernels {version('vllm-fp4-plugin')}",
        f"torch {version('torch')}",
    ]
    assert lines[2].startswith("nvidia-cutlass-dsl ")


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        if name == "nvidia-cutlass-dsl":
            raise PackageNotFoundError(name)
        return "1.2"

    monkeypatch.setattr(version_option, "version", absent)
    done = CliRunner().invoke(app, ["--version"])
    assert done.exit_code == 0
    assert done.stdout.splitlines() == [
        "nvfp4_kernels 1.2",
        "torch 1.2",
        "nvidia-cutlass-dsl not installed",
    ]
