"""Engines on a real GPU, W4A16: against the CPU, compiled against eager, two GPUs against one.

Bounds as in ``test_engine``: on the mean absolute difference of log-probabilities.
"""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
if torch.cuda.get_device_capability() != (9, 0):
    pytest.skip(f"needs sm_90, {torch.cuda.get_device_name()} is not", allow_module_level=True)

from tests.engine import Run, dequantized, distance

pytestmark = pytest.mark.slow

SAME_W4A16 = 0.012
KERNEL = "nvfp4_gemm_w4a16/wgmma (sm_90)"


def serve(checkpoint: Path, **engine_args: Any) -> tuple[Run, str]:
    """In a process of its own: what the engine said, and its log."""
    settings = {"gpu_memory_utilization": 0.3, "kv_cache_dtype": "bfloat16"}
    arguments = json.dumps(settings | engine_args)
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine", str(checkpoint), arguments],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return Run(report=[], **json.loads(done.stdout.strip().splitlines()[-1])), (
        done.stdout + done.stderr
    )


def perplexity(result: Run) -> float:
    return math.exp(-sum(result.logprobs) / len(result.logprobs))


@pytest.mark.parametrize("kind", ["weight_only", "modelopt"])
def test_a_trained_model_says_what_it_says_on_the_cpu(
    kind: str, request: pytest.FixtureRequest
) -> None:
    checkpoint = request.getfixturevalue(kind)
    expected = dequantized(checkpoint)
    eager, log = serve(checkpoint)
    assert f"qkv_proj ×2: {KERNEL}, W4A16" in log
    assert distance(eager, expected) < SAME_W4A16
    assert perplexity(eager) == pytest.approx(perplexity(expected), rel=0.01)
    graphs, _ = serve(checkpoint, enforce_eager=False)
    assert distance(graphs, expected) < SAME_W4A16
    assert perplexity(graphs) == pytest.approx(perplexity(expected), rel=0.01)


@pytest.mark.parametrize("kind", ["weight_only", "modelopt"])
def test_two_gpus_say_what_one_says(kind: str, request: pytest.FixtureRequest) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    checkpoint = request.getfixturevalue(kind)
    one, _ = serve(checkpoint)
    two, _ = serve(checkpoint, tensor_parallel_size=2)
    assert distance(one, two) < SAME_W4A16
    assert one.generated == two.generated
