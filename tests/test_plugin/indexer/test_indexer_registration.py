"""Registration of the plugin's layers in vLLM: the platforms, and the layers that a model gets."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.test_plugin.indexer.indexer_v32 import GenericLayer


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Empty registry in the place of vLLM's, for one test."""
    from vllm.model_executor import custom_op

    from vllm_fp4_plugin.indexer import registration

    registry: dict[str, Any] = {}
    monkeypatch.setattr(custom_op, "op_registry_oot", registry)
    monkeypatch.setattr(registration, "op_registry_oot", registry)
    return registry


def test_registered(vllm_config: Any) -> None:
    """The plugin registers its layers for every model."""
    from vllm.model_executor.custom_op import op_registry_oot

    from vllm_fp4_plugin.indexer.layer import LatentAttention
    from vllm_fp4_plugin.indexer.op import KeySelectingIndexer

    assert op_registry_oot["SparseAttnIndexer"] is KeySelectingIndexer
    assert KeySelectingIndexer.name == "sparse_attn_indexer"
    assert op_registry_oot["MultiHeadLatentAttentionWrapper"] is LatentAttention


@pytest.mark.parametrize(("device", "expected"), [("cpu", 2), ("cuda", 2), ("xpu", 0), ("rocm", 0)])
def test_platforms(
    device: str, expected: int, registry: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_fp4_plugin.indexer import registration

    platform = SimpleNamespace(is_cpu=lambda: device == "cpu", is_cuda=lambda: device == "cuda")
    monkeypatch.setattr(registration, "current_platform", platform)
    for _ in range(2):  # vLLM may call a plugin again
        registration.register()
    assert len(registry) == expected


def test_another_plugins_layer_stays(registry: dict[str, Any]) -> None:
    from vllm_fp4_plugin.indexer import registration

    registry["SparseAttnIndexer"] = other = object()
    registration.register()
    assert registry["SparseAttnIndexer"] is other


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "fp8", "bf16", None])
def test_the_layer_around_the_indexer(
    fmt: str | None, indexer_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Latent attention, which vLLM lacks on CPU, gets the indexer class of the format."""
    from vllm.model_executor.layers import mla
    from vllm.model_executor.models.deepseek_v2 import Indexer

    from vllm_fp4_plugin.indexer.layer import LatentAttention, UnquantizedIndexer

    class NoAttention(torch.nn.Module):
        def __init__(self, **given: Any) -> None:
            super().__init__()
            self.layer_name = given["prefix"]

    monkeypatch.setattr(mla, "MLAAttention", NoAttention)
    indexer = GenericLayer(indexer_config, fmt).indexer
    indexer.__class__ = Indexer
    parts = dict.fromkeys(mla.MLAModules.__dataclass_fields__)
    modules = mla.MLAModules(**parts | {"indexer": indexer, "is_sparse": True})
    layer = mla.MultiHeadLatentAttentionWrapper(
        64, 4, 1.0, 8, 8, 8, 48, 16, modules, prefix="model.layers.0.self_attn"
    )
    assert type(layer) is LatentAttention
    assert type(layer.indexer) is (Indexer if fmt in ("fp8", None) else UnquantizedIndexer)
