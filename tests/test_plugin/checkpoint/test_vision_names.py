"""Layers of a vision model by vLLM's own mapper: module names differ from the names on disk."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration

from nvfp4_kernels.formats.nvfp4 import quantize_weight
from tests import tiny_llama
from tests.mixed_checkpoints import FP8, GROUPS, quantize
from vllm_fp4_plugin.engine import meta_model
from vllm_fp4_plugin.formats.kind import Kind

pytestmark = pytest.mark.processes  # takes seconds

FP4 = FP8 | {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}
# The list names neither the tower nor the projector, and the regex applies to names on disk.
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {"format": "nvfp4-pack-quantized", "targets": ["Linear"], "weights": FP4},
        "group_1": GROUPS[Kind.FP8_CHANNEL]
        | {"targets": [r"re:model\.language_model\.layers\.\d+\.self_attn\..*"]},
    },
}
SIZES: dict[str, Any] = {
    "text_config": {
        "model_type": "gemma",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 320,
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 16,
    },
    "projection_dim": 128,
    "image_token_index": 300,
}


def quantised(module: str, weight: Tensor) -> dict[str, Tensor]:
    if ".self_attn." in module:
        return quantize(Kind.FP8_CHANNEL, weight, modelopt=False).tensors
    nvfp4 = quantize_weight(weight.float())
    return {
        "weight_packed": nvfp4.data,
        "weight_scale": nvfp4.scales,
        "weight_global_scale": nvfp4.global_scale.reciprocal().view(1),
    }


@pytest.mark.parametrize("tower", ["model.vision_tower.vision_model", "model.vision_tower"])
def test_layers_of_a_vision_model(tower: str, tmp_path: Path) -> None:
    """The second tower name is unknown to vLLM: sibling tensors show that it is unquantised."""
    torch.manual_seed(0)
    model = PaliGemmaForConditionalGeneration(PaliGemmaConfig(**SIZES)).bfloat16()
    model.save_pretrained(tmp_path)
    tiny_llama.tokenizer().save_pretrained(tmp_path)
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.model.named_parameters():
        name = f"model.{name}".replace("model.vision_tower", tower)
        module = name.removesuffix(".weight")
        if module.startswith("model.language_model.layers.") and module.endswith("_proj"):
            parts = quantised(module, tensor.detach())
            tensors |= {f"{module}.{part}": t.contiguous() for part, t in parts.items()}
        else:
            tensors[name] = tensor.detach().contiguous()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = QUANTIZATION
    (tmp_path / "config.json").write_text(json.dumps(config))

    # A report would run the dry load, which fails for the checkpoint with the second name.
    with meta_model.built(str(tmp_path)) as (_, vllm_config):
        report = vllm_config.quant_config.startup.report
    layers = {record.name: record for record in report.layers}
    kernels = {
        name.removeprefix("language_model.model.layers.0."): (record.kernel, record.reason)
        for name, record in layers.items()
        if name.endswith("_proj")
    }
    fp8 = "fp8 (vLLM: CompressedTensorsW8A8Fp8)", ""
    assert kernels["self_attn.qkv_proj"] == kernels["self_attn.o_proj"] == fp8
    assert kernels["mlp.down_proj"] == ("nvfp4_gemm_w4a16/reference (cpu)", "")
    seen = [record for name, record in layers.items() if name.startswith("vision_tower.")]
    assert len(seen) == 4
    for record in seen:
        assert record.kernel == "unquantized (vLLM)"
        assert record.reason == "left out of the checkpoint's list"
