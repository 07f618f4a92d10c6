"""Engines on a GPU with ``VLLM_BATCH_INVARIANT``, compiled and in CUDA graphs as by default."""

import json
import os
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
from vllm_fp4_plugin.quantizer.checkpoint import quantize_checkpoint

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("head_size", "backend", "engine"),
    [
        (128, "FLASH_ATTN", {}),
        (128, "FLASH_ATTN", {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL"}}),
        (128, "FLASH_ATTN", {"enforce_eager": True}),
        (32, "TRITON_ATTN", {}),
        (128, "FLASH_ATTN", {"additional_config": {"nvfp4_tc": {"activation": "fp8"}}}),
    ],
    ids=["default", "full graphs", "eager", "small heads", "FP8"],
)
def test_batch(head_size: int, backend: str, engine: dict[str, Any], tmp_path: Path) -> None:
    plain = tiny_llama.save(tmp_path / "plain", head_dim=head_size, max_position_embeddings=1024)
    quantize_checkpoint(plain, tmp_path / "model")
    settings = {
        "attention_backend": backend,
        "enforce_eager": False,
        "max_model_len": 512,
        "gpu_memory_utilization": 0.2,
        "kv_cache_memory_bytes": 1 << 27,  # unmeasured: other processes may come and go
    }
    arguments = [tmp_path / "model", json.dumps(settings | engine), tmp_path / "counts"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.invariant_engine", *map(str, arguments)],
        env=os.environ | {"VLLM_BATCH_INVARIANT": "1"},
        capture_output=True,
        text=True,
        timeout=limits.PROCESS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    batch, cached, tokens = json.loads((tmp_path / "counts").read_text())
    assert (batch, cached) == (0, 0)
    assert tokens > 300
