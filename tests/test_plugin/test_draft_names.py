"""Names of a draft's layers in its checkpoint, of which each exporter has its own."""

from types import SimpleNamespace

import pytest

from vllm_fp4_plugin.draft_names import is_draft, on_disk

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
        ("LlamaForCausalLM", False),
    ],
)
def test_which_models_are_drafts(architecture: str, expected: bool) -> None:
    assert is_draft(SimpleNamespace(architectures=[architecture])) is expected
    assert not is_draft(SimpleNamespace(architectures=None))
    assert not is_draft(None)
