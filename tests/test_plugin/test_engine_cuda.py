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

from tests import limits, tiny_llama
from tests.engine import Run, dequantized, distance
from vllm_fp4_plugin.quantizer.checkpoint import quantize_checkpoint

pytestmark = pytest.mark.slow

SAME_W4A16 = 0.012
KERNEL = "nvfp4_gemm_w4a16/wgmma (sm_90)"
ATTENTION = "nvfp4_decode_attention/DecodeAttentionSm90 (sm_90), prefill FlashAttention 3 (vLLM)"


def serve(checkpoint: Path, **engine_args: Any) -> tuple[Run, str]:
    """In a process of its own: what the engine said, and its log."""
    settings = {"gpu_memory_utilization": 0.3, "kv_cache_dtype": "bfloat16"}
    arguments = json.dumps(settings | engine_args)
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine", str(checkpoint), arguments],
        capture_output=True,
        text=True,
        timeout=limits.PROCESS,
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


def test_decode_attention_says_what_flash_attention_says(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With heads of 64, which it takes, in CUDA graphs; the same tokens follow the text."""
    bf16 = tiny_llama.trained(tmp_path_factory.getbasetemp() / "heads-of-64", head_dim=64)
    checkpoint = tmp_path / "model"
    quantize_checkpoint(bf16, checkpoint)
    ours, log = serve(checkpoint, enforce_eager=False)
    assert f"attn ×2: {ATTENTION}" in log
    theirs, log = serve(checkpoint, enforce_eager=False, attention_backend="FLASH_ATTN")
    assert "attn ×2: FLASH_ATTN (vLLM)" in log
    assert distance(ours, dequantized(checkpoint)) < SAME_W4A16
    assert ours.generated == theirs.generated


@pytest.mark.parametrize("kind", ["weight_only", "modelopt"])
def test_two_gpus_say_what_one_says(kind: str, request: pytest.FixtureRequest) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    checkpoint = request.getfixturevalue(kind)
    one, _ = serve(checkpoint)
    two, _ = serve(checkpoint, tensor_parallel_size=2)
    assert distance(one, two) < SAME_W4A16
    assert one.generated == two.generated
