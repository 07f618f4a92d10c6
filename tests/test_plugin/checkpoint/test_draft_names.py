"""Names of a draft's layers in the checkpoint, which differ between exporters."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.models import registry

from nvfp4_kernels.formats.nvfp4 import quantize_weight
from vllm_fp4_plugin.checkpoint.draft_names import is_draft, on_disk
from vllm_fp4_plugin.config import Nvfp4TcConfig

LAYER = "model.layers.32.self_attn.qkv_proj"


@pytest.mark.parametrize(
    ("prefix", "parents", "expected"),
    [
        (LAYER, ("midlayer.self_attn",), "midlayer.self_attn.qkv_proj"),
        (LAYER, ("layers.0.self_attn",), "layers.0.self_attn.qkv_proj"),
        (LAYER, ("model.layers.0.self_attn",), "model.layers.0.self_attn.qkv_proj"),
        (LAYER, ("transformer.h",), LAYER),
        ("model.layers.33.mlp.down_proj", ("midlayer.mlp",), "model.layers.33.mlp.down_proj"),
        ("model.layers.33.mlp.down_proj", ("layers.1.mlp",), "layers.1.mlp.down_proj"),
        ("model.fc", ("",), "fc"),
        ("model.fc", ("encoder",), "encoder.fc"),
        ("model.markov_head.markov_w2", ("markov_head",), "markov_head.markov_w2"),
        # Gemma 4's DSpark and Laguna's DFlash number their own layers from 0.
        ("model.layers.0.mlp.down_proj", ("layers.0.mlp",), "layers.0.mlp.down_proj"),
        ("model.layers.4.mlp.down_proj", ("layers.0.mlp",), "model.layers.4.mlp.down_proj"),
    ],
)
def test_names_on_disk(prefix: str, parents: tuple[str, ...], expected: str) -> None:
    assert on_disk(prefix, 32, lambda name: name.rpartition(".")[0] in parents) == expected


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("LlamaForCausalLMEagle3", True),
        ("Eagle3LlamaForCausalLM", True),
        ("EagleMistralForCausalLM", True),
        ("DFlashDraftModel", True),
        ("Qwen3DSparkModel", True),
        ("LiLiCorrDraftModel", True),
        ("Qwen3XPressModel", True),
        ("NemotronHMTPModel", False),
        ("LlamaForCausalLM", False),
    ],
)
def test_which_models_are_drafts(architecture: str, expected: bool) -> None:
    assert is_draft(SimpleNamespace(architectures=[architecture])) is expected
    assert not is_draft(SimpleNamespace(architectures=None))
    assert not is_draft(None)


def test_every_speculative_model_of_vllm_is_a_draft_or_a_head() -> None:
    """A draft that is mistaken for a head would get layer names without tensors."""
    neither = {"ExtractHiddenStatesModel"}  # which has no layers
    for architecture in registry._SPECULATIVE_DECODING_MODELS.keys() - neither:
        is_head = "MTP" in architecture and not architecture.startswith("Eagle")
        found = is_draft(SimpleNamespace(architectures=[architecture]))
        assert found is not is_head, architecture


@pytest.mark.parametrize("counted", [True, False], ids=["counted on", "own numbers"])
@pytest.mark.parametrize(
    "architecture",
    ["DFlashDraftModel", "Qwen3DSparkModel", "Qwen3XPressModel", "Eagle3LlamaForCausalLM"],
)
def test_layers_of_a_draft_are_what_its_tensors_are(
    architecture: str, counted: bool, vllm_config: Any, tmp_path: Path
) -> None:
    """Tensors decide, though the config calls 16-bit layers NVFP4; no name has ``model``."""
    tensors = {"layers.0.mlp.down_proj.weight": torch.zeros(128, 256, dtype=torch.bfloat16)}
    for projection, n in (("q", 256), ("k", 128), ("v", 128)):
        weight = quantize_weight(torch.randn(n, 128))
        parts = weight.data, weight.scales, weight.global_scale
        names = ("weight", "weight_scale", "weight_scale_2")
        module = f"layers.0.self_attn.{projection}_proj"
        tensors |= {f"{module}.{name}": part for name, part in zip(names, parts, strict=True)}
    save_file(tensors, tmp_path / "model.safetensors")
    config = Nvfp4TcConfig.from_config(
        {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "ignore": []}
    )
    config.maybe_update_config(str(tmp_path), SimpleNamespace(architectures=[architecture]))
    target = SimpleNamespace(get_total_num_hidden_layers=lambda: 30)
    vllm_config.speculative_config = SimpleNamespace(
        target_model_config=target, enable_adaptive_verification=False
    )
    layer = f"model.layers.{30 if counted else 0}"
    qkv = QKVParallelLinear(
        128, 128, 2, 1, bias=False, quant_config=config, prefix=f"{layer}.self_attn.qkv_proj"
    )
    down = RowParallelLinear(
        256, 128, bias=False, quant_config=config, prefix=f"{layer}.mlp.down_proj"
    )
    assert type(qkv.quant_method).__name__ == "Nvfp4LinearMethod"
    assert type(down.quant_method).__name__ == "UnquantizedLinearMethod"
