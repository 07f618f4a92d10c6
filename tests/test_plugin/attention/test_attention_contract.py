"""Shortcuts in vLLM that a backend must declare or refuse: the plugin's backend takes none.

The cases: queries in FP8; keys that another op or another layer has already stored.
"""

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nvfp4_kernels import InvalidArgument
from tests.test_plugin.attention.attention_layer import BOUND, Layer, Model, Sequence
from vllm_fp4_plugin.attention.errors import UnsupportedAttention

E4M3 = torch.float8_e4m3fn
FUSED_STORE = "vllm.models.muse_spark.common.ops.fused_qk_norm_rope_kv"


@pytest.fixture
def layer(vllm_config: Any) -> Any:
    """Attention layer of vLLM with an FP8 cache, on the plugin's backend."""
    from vllm.config import AttentionConfig
    from vllm.model_executor.layers.attention import Attention

    vllm_config.compilation_config.static_forward_context = {}
    vllm_config.attention_config = AttentionConfig(backend="CUSTOM")
    vllm_config.cache_config.cache_dtype = "fp8"
    return Attention(
        4, 32, 0.1, num_kv_heads=2, cache_config=vllm_config.cache_config, prefix="layer"
    )


def test_vllm_leaves_queries_in_16_bits(layer: Any) -> None:
    assert layer.get_attn_backend().get_name() == "CUSTOM"
    assert layer.kv_cache_dtype == "fp8"
    assert layer.query_quant is None


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
def test_queries_in_fp8_are_refused(cache_dtype: str) -> None:
    layer = Layer(Model(cache_dtype=cache_dtype))
    forward = layer.impl.forward

    def in_fp8(of: Any, q: Tensor, *rest: Any) -> None:
        forward(of, q.to(E4M3), *rest)

    layer.impl.forward = in_fp8
    with pytest.raises(
        InvalidArgument, match="q: dtype is float8_e4m3fn, must be bfloat16, float16"
    ):
        layer.step([(Sequence(), 5)])


@pytest.mark.skipif(find_spec("vllm.models.muse_spark") is None, reason="a model of vLLM 0.33")
def test_vllms_fused_stores_pass_our_layers_by(layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either of the backend's two declarations keeps vLLM's fused store away."""
    fused = pytest.importorskip(FUSED_STORE)
    backend = layer.attn_backend
    assert not fused.supports_fused_kv_insert(layer)
    monkeypatch.setattr(backend, "forward_includes_kv_cache_update", False)
    assert not fused.supports_fused_kv_insert(layer)
    monkeypatch.setattr(backend, "supports_kv_cache_update_bypass", True)
    assert fused.supports_fused_kv_insert(layer)


def test_keys_that_nobody_gives_are_refused() -> None:
    layer = Layer(Model())
    forward = layer.impl.forward

    def without(of: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> None:
        forward(of, q, None, None, *rest)

    layer.impl.forward = without
    with pytest.raises(UnsupportedAttention, match=r"key: is None, must be given, .*FLASH_ATTN on"):
        layer.step([(Sequence(), 5)])


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
def test_keys_of_another_layer_need_not_be_given(cache_dtype: str) -> None:
    layer = Layer(Model(cache_dtype=cache_dtype))
    writer = layer.impl
    reader = type(writer)(
        4, 32, 32**-0.5, 2, kv_cache_dtype=cache_dtype, kv_sharing_target_layer_name="another"
    )

    def both(of: Any, q: Tensor, k: Tensor, v: Tensor, pages: Tensor, step: Any, out: Any) -> None:
        writer.store(of, k, v, pages, step.slot_mapping)
        reader.forward(of, q, None, None, pages, step, out)

    layer.impl = SimpleNamespace(forward=both)
    sequence = Sequence()
    for tokens in (20, 1, 3):
        output, expected = layer.step([(sequence, tokens)])
        assert (output - expected).abs().max() < BOUND
