"""Quantised embedding: decoded rows, padding, two ranks, and an engine."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from vllm.model_executor.layers import vocab_parallel_embedding as embedding
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from nvfp4_kernels.formats.nvfp4 import Convention, Nvfp4Tensor, quantize_weight
from tests.engine import dequantized, distance, run
from tests.test_plugin.checkpoint.test_layer_kinds import CT_NVFP4, FP8, NVFP4, headers
from tests.test_plugin.engine.test_engine import SAME_W4A16
from tests.test_plugin.linear.test_linear_layers import (
    INPUT_SCALE,
    checkpoint,
    finish,
    load,
    quantised_shards,
    tensors_on_disk,
)
from vllm_fp4_plugin.config import Nvfp4TcConfig
from vllm_fp4_plugin.formats import UnsupportedCheckpoint

K = 96
VOCABULARY = 100  # vLLM pads it to 128
NAME = "model.embed_tokens"


def built(format: Convention, tensors: Any) -> VocabParallelEmbedding:
    config = Nvfp4TcConfig(checkpoint(format))
    assert config._kinds is not None
    config._kinds.read(headers({NAME: tensors}))
    return VocabParallelEmbedding(VOCABULARY, K, quant_config=config, prefix=NAME)


def loaded(format: Convention, shard: Nvfp4Tensor) -> Any:
    layer = built(format, NVFP4 if format == "modelopt" else CT_NVFP4)
    load(layer, tensors_on_disk(shard, INPUT_SCALE, checkpoint(format)))
    finish(layer)
    return layer


def expected(shard: Nvfp4Tensor, ids: Tensor) -> Tensor:
    return shard.dequantize(torch.bfloat16)[ids]


@pytest.mark.usefixtures("vllm_config")
@pytest.mark.parametrize("format", ["modelopt", "compressed-tensors"])
def test_rows_are_the_decoded_weights(format: Convention) -> None:
    """Rows are bit-identical; a rounded reciprocal of the global scale would change bits."""
    torch.manual_seed(0)
    rows = torch.randn(VOCABULARY, K)
    shard = quantize_weight(rows, torch.tensor(2.0**-9, dtype=torch.float32))
    ids = torch.tensor([[3, 99, 0], [3, 50, 7]])
    assert torch.equal(loaded(format, shard)(ids), expected(shard, ids))


@pytest.mark.usefixtures("vllm_config")
def test_two_ranks_hold_half_of_the_vocabulary_each(monkeypatch: pytest.MonkeyPatch) -> None:
    [shard] = quantised_shards([VOCABULARY], [1.0])
    ids = torch.arange(VOCABULARY)
    monkeypatch.setattr(embedding, "get_tensor_model_parallel_world_size", lambda: 2)
    monkeypatch.setattr(embedding, "tensor_model_parallel_all_reduce", lambda part: part)
    found = torch.zeros(VOCABULARY, K, dtype=torch.bfloat16)
    for rank in (0, 1):
        monkeypatch.setattr(embedding, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
        layer = loaded("modelopt", shard)
        assert len(layer.weight) == 64
        found += layer(ids)
    assert torch.equal(found, expected(shard, ids))


@pytest.mark.usefixtures("vllm_config")
def test_weights_stay_in_four_bits() -> None:
    [shard] = quantised_shards([VOCABULARY], [1.0])
    layer = loaded("modelopt", shard)
    held = sum(p.numel() * p.element_size() for p in layer.parameters())
    assert held == 128 * K * (4 + 8 / 16) / 8 + 4


def test_a_quantised_embedding_is_no_head(
    vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_config.model_config.hf_text_config, "tie_word_embeddings", True)
    message = rf"{NAME}: is quantised, but the model takes it as the head too .* excluded"
    with pytest.raises(UnsupportedCheckpoint, match=message):
        built("modelopt", NVFP4)


@pytest.mark.usefixtures("vllm_config")
def test_fp8_rows_are_refused() -> None:
    with pytest.raises(
        UnsupportedCheckpoint, match=rf"{NAME}: is FP8 .*, must be in 16 bits, or in"
    ):
        built("modelopt", FP8)


def quantize_embedding(model: Path) -> None:
    """Change a checkpoint's embedding from 16 bits to NVFP4 without changing the config."""
    tensors = load_file(model / "model.safetensors")
    rows = quantize_weight(tensors.pop(f"{NAME}.weight").float())
    tensors |= {
        f"{NAME}.weight": rows.data,
        f"{NAME}.weight_scale": rows.scales,
        f"{NAME}.weight_scale_2": rows.global_scale,
    }
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.slow
def test_engine(weight_only: Path, tmp_path: Path) -> None:
    model = shutil.copytree(weight_only, tmp_path / "model")
    quantize_embedding(model)
    served = run(str(model))
    assert "embed_tokens ×1: lookup (torch), W4A16" in served.report
    assert distance(served, dequantized(model)) < SAME_W4A16
    config = json.loads((model / "config.json").read_text())
    assert NAME not in json.dumps(config)  # by its tensors alone
