"""Fixtures with a configured vLLM that runs nothing: enough to build layers one by one."""

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Engines run in this process instead of two more: faster, and errors surface here.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from tests import heap, tiny_llama
from tests.engine import inspect_models_here


@pytest.fixture(scope="session", autouse=True)
def models_are_inspected_here() -> None:
    inspect_models_here()


@pytest.fixture(scope="module", autouse=True)
def heap_is_set_aside() -> Iterator[None]:
    """Freeze the heap: building a model collects garbage, which is slow once vLLM is loaded."""
    with heap.set_aside():
        yield


@pytest.fixture(scope="session")
def bf16_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.save(tmp_path_factory.mktemp("bf16"))


@pytest.fixture(scope="session")
def bf16(pytestconfig: pytest.Config) -> Path:
    """Trained 16-bit model, kept between runs."""
    cache = pytestconfig.rootpath / ".cache" / "tests"
    cache.mkdir(parents=True, exist_ok=True)
    return tiny_llama.trained(cache / f"trained-{tiny_llama.version()}")


@pytest.fixture(scope="session")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("calibration") / "text.txt"
    file.write_text(tiny_llama.training_text()[:20_000])
    return file


@pytest.fixture(scope="session")
def modelopt(bf16: Path, calibration: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained model in ModelOpt's format, with scales for an FP8 KV cache."""
    from vllm_fp4_plugin.quantizer.checkpoint import quantize_checkpoint

    dst = tmp_path_factory.mktemp("modelopt") / "model"
    quantize_checkpoint(bf16, dst, calibrate=calibration, seq_len=128, kv_cache_scheme="fp8")
    return dst


@pytest.fixture(scope="session")
def weight_only(bf16: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained model with NVFP4 weights and 16-bit activations."""
    from vllm_fp4_plugin.quantizer.checkpoint import quantize_checkpoint

    dst = tmp_path_factory.mktemp("weight-only") / "model"
    quantize_checkpoint(bf16, dst)
    return dst


@pytest.fixture(scope="module")
def base_config(bf16_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Engine config of the tiny model, with one process's parallel groups set up."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    args = EngineArgs(model=str(bf16_checkpoint), quantization="nvfp4-tc", enforce_eager=True)
    config = args.create_engine_config()
    rendezvous = tmp_path_factory.mktemp("rendezvous") / "store"
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    yield config
    with heap.set_aside():
        cleanup_dist_env_and_memory()


@pytest.fixture
def vllm_config(base_config: Any) -> Iterator[Any]:
    """Copy of ``base_config``, current for one test; torch's default dtype is bfloat16."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = copy.copy(base_config)
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        yield config


@pytest.fixture
def indexer_config(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Config without sparse-attention layers, whose metadata the CPU can build."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.models import deepseek_v2
    from vllm.v1.attention.backends.mla import compressor_utils, indexer

    from tests.test_plugin.indexer import indexer_layer as ours

    monkeypatch.setattr(indexer, "_BUILD_PREFILL_CHUNK_METADATA_KERNEL", ours.prefill_bounds)
    monkeypatch.setattr(compressor_utils, "_COMPRESSED_SLOT_MAPPING_KERNEL", ours.compressed_slots)
    monkeypatch.setattr(deepseek_v2, "per_token_group_quant_fp8", ours.quantize_fp8)
    for part in ("compilation_config", "cache_config", "parallel_config", "model_config"):
        setattr(vllm_config, part, copy.copy(getattr(vllm_config, part)))
    vllm_config.compilation_config.static_forward_context = {}
    vllm_config.cache_config.block_size = ours.BLOCK_SIZE
    with set_current_vllm_config(vllm_config):
        yield vllm_config
