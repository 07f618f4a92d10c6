"""Engines on a real GPU: against the CPU, compiled against eager, two GPUs against one.

Bounds are those of ``test_engine``, on the mean absolute difference of log-probabilities.
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
from tests.engine import Run, dequantized, distance, with_values
from tests.mixed_checkpoints import write
from tests.test_plugin.linear.test_embedding import quantize_embedding
from vllm_fp4_plugin.formats.kind import Kind
from vllm_fp4_plugin.quantizer.checkpoint import quantize_checkpoint

pytestmark = pytest.mark.slow

SAME_W4A16 = 0.012
SAME_FP8 = 0.03
SAME_W4A8 = 0.04  # by other roundings, see ``test_fp8_engine``
FROM_W4A16 = 0.1  # seen on a CPU: .038
FP8_CACHE = 0.1  # an estimate: FlashAttention rounds queries to E4M3 too
KERNEL = "nvfp4_gemm_w4a16/wgmma (sm_90)"
FP8 = "nvfp4_gemm_w4a8/fp8_wgmma (sm_90), W4A8"
ATTENTION = "nvfp4_decode_attention/DecodeAttentionSm90 (sm_90), prefill FlashAttention 3 (vLLM)"


def serve(checkpoint: Path, **engine_args: Any) -> tuple[Run, str]:
    """Run an engine in a separate process; returns the answer and the log."""
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


@pytest.mark.parametrize("kind", ["weight_only", "modelopt"])
def test_fp8(kind: str, request: pytest.FixtureRequest) -> None:
    """Layers take FP8 on request: calibrated layers with their scale, others per token."""
    checkpoint = request.getfixturevalue(kind)
    expected = dequantized(checkpoint)
    option = {"additional_config": {"nvfp4_tc": {"activation": "fp8"}}}
    eager, log = serve(checkpoint, **option)
    scaling = "per-token" if kind == "weight_only" else "static"
    assert f"qkv_proj ×2: {FP8} {scaling}" in log
    assert "kinds of fused ops agree with their unfused forms" in log
    assert "unfused at start" not in log
    assert 0 < distance(eager, expected) < FROM_W4A16
    graphs, _ = serve(checkpoint, enforce_eager=False, **option)
    assert distance(graphs, eager) < SAME_W4A8
    apart = {"activation": "fp8", "fuse_norm": False, "fuse_mlp": False}
    unfused, _ = serve(checkpoint, additional_config={"nvfp4_tc": apart})
    assert distance(unfused, eager) < SAME_W4A8


@pytest.fixture(scope="module")
def heads_of_64(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint whose heads have 64 elements, which the decode kernel supports."""
    bf16 = tiny_llama.trained(tmp_path_factory.getbasetemp() / "heads-of-64", head_dim=64)
    checkpoint = tmp_path_factory.mktemp("nvfp4") / "model"
    quantize_checkpoint(bf16, checkpoint)
    return checkpoint


def test_decode_attention_says_what_flash_attention_says(heads_of_64: Path) -> None:
    """Engines run in CUDA graphs."""
    checkpoint = heads_of_64
    ours, log = serve(checkpoint, enforce_eager=False)
    assert f"attn ×2: {ATTENTION}" in log
    theirs, log = serve(checkpoint, enforce_eager=False, attention_backend="FLASH_ATTN")
    assert "attn ×2: FLASH_ATTN (vLLM)" in log
    assert distance(ours, dequantized(checkpoint)) < SAME_W4A16
    assert ours.generated == theirs.generated


def test_fp8_cache(heads_of_64: Path) -> None:
    """Our kernel decodes if asked for, FlashAttention prefills; also in CUDA graphs."""
    expected = dequantized(heads_of_64)
    fp8 = {"kv_cache_dtype": "fp8", "attention_backend": "CUSTOM"}
    for enforce_eager in (True, False):
        served, log = serve(heads_of_64, enforce_eager=enforce_eager, **fp8)
        label = ATTENTION.replace("attention/", "attention_fp8_kv/")
        assert f"attn ×2: {label}, fp8_e4m3 KV cache" in log
        assert distance(served, expected) < FP8_CACHE
        assert perplexity(served) == pytest.approx(perplexity(expected), rel=0.03)


MIXED: dict[str, dict[str, Kind]] = {
    "modelopt": {
        **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), Kind.NVFP4_A16),
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), Kind.FP8),
        "lm_head": Kind.FP8_CHANNEL,
    },
    "compressed-tensors": {
        **dict.fromkeys(("gate_proj", "up_proj"), Kind.NVFP4_A16),
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "lm_head"), Kind.FP8_CHANNEL),
        "down_proj": Kind.NVFP4,
        "o_proj": Kind.FP8,
    },
}


@pytest.mark.parametrize("format", MIXED)
def test_fp8_layers_are_vllms(format: str, bf16: Path, modelopt: Path, tmp_path: Path) -> None:
    """FP8 layers run by vLLM, which requantises shards with one scale, in the plugin's model."""
    model = write(tmp_path / "model", bf16, modelopt, MIXED[format], modelopt=format == "modelopt")
    expected = with_values(model.path, model.values, model.inputs)
    served, log = serve(model.path, enforce_eager=False)
    for layer in ("qkv_proj ×2", "o_proj ×2", "lm_head ×1"):
        assert f"{layer}: fp8 (vLLM: " in log
    assert f"down_proj ×2: {KERNEL}, W4A16" in log
    assert distance(served, expected) < SAME_FP8


def test_head_and_embedding(bf16: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    quantize_checkpoint(bf16, model, lm_head=True)
    quantize_embedding(model)
    served, log = serve(model, enforce_eager=False)
    assert f"lm_head ×1: {KERNEL}, W4A16" in log
    assert "embed_tokens ×1: lookup (torch), W4A16" in log
    assert distance(served, dequantized(model)) < SAME_W4A16


@pytest.fixture
def mixed(bf16: Path, modelopt: Path, tmp_path: Path) -> Path:
    """Checkpoint with NVFP4, FP8 and 16-bit layers, an FP8 head and an NVFP4 embedding."""
    model = write(tmp_path / "model", bf16, modelopt, MIXED["modelopt"], modelopt=True)
    quantize_embedding(model.path)
    return model.path


@pytest.mark.parametrize("kind", ["weight_only", "modelopt", "mixed"])
def test_two_gpus_say_what_one_says(kind: str, request: pytest.FixtureRequest) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    checkpoint = request.getfixturevalue(kind)
    one, _ = serve(checkpoint)
    two, _ = serve(checkpoint, tensor_parallel_size=2)
    assert distance(one, two) < (SAME_FP8 if kind == "mixed" else SAME_W4A16)
    assert one.generated == two.generated
