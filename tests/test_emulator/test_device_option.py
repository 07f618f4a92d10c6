"""The ``--device`` option: one test body runs on the emulator and on a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.devices import cutlass_or_skip

ROOT = Path(__file__).parents[2]
BODY = "tests/test_emulator/test_whole_kernels.py::test_any_device"


def run(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={folder}", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


def test_both_are_two_runs(tmp_path: Path) -> None:
    cutlass_or_skip()
    emulated, cuda = run(tmp_path, "--device", "both", BODY).split("=== --device cuda")
    assert "=== --device emulator" in emulated
    assert "6 passed" in emulated
    if torch.cuda.is_available():
        assert "1 passed" in cuda
    else:
        assert "1 skipped" in cuda
        assert "--device cuda: this machine has no CUDA device" in cuda


def test_an_unknown_device_is_refused(tmp_path: Path) -> None:
    assert "argument --device: invalid choice: 'tpu'" in run(tmp_path, "--device", "tpu", BODY)
