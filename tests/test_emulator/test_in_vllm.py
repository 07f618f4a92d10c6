"""Emulator inside vLLM's CPU worker, in a separate process."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests import preloaded
from tests.devices import cutlass_or_skip

ROOT = Path(__file__).parents[2]


def test_a_kernel_runs_in_a_vllm_worker(tmp_path: Path) -> None:
    cutlass_or_skip()
    pytest.importorskip("vllm")
    from tests import tiny_llama

    model = tiny_llama.save(tmp_path / "model")
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    done = subprocess.run(
        preloaded.command("tests.test_emulator.kernels.in_vllm", model),
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    # vLLM writes to standard output as well.
    found = json.loads(next(x for x in done.stdout.splitlines() if x.startswith('{"here"')))
    assert found["process"] != found["here"]
    assert found["exact"]
    assert found["multiplies"] == {"mxf4nvf4 128 128 64 1": 4}
