"""Experts that vLLM's own methods serve: the method, and the arithmetic in the report."""

from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.quantization import fp8

from nvfp4_kernels.formats.nvfp4 import Convention
from tests.test_plugin.experts.test_experts import PREFIX, E, Layer
from vllm_fp4_plugin.experts.vllm_methods import keeps_16_bits, vllm_experts
from vllm_fp4_plugin.formats import (
    FORMATS,
    INVERSE_SCALE,
    CheckpointConfig,
    LayerGroup,
    UnsupportedCheckpoint,
)
from vllm_fp4_plugin.formats.kind import Kind
from vllm_fp4_plugin.startup import Startup

Backend = Enum("Backend", ["MARLIN", "HUMMING", "VLLM_CUTLASS"])


@pytest.mark.parametrize(
    ("name", "setting", "kept"),
    [
        ("MARLIN", "", True),
        ("HUMMING", "", True),
        ("HUMMING", '{"dtype": "float8e4m3"}', False),
        ("VLLM_CUTLASS", "", False),
    ],
)
def test_who_keeps_activations_in_16_bits(
    name: str, setting: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if setting:
        monkeypatch.setenv("VLLM_HUMMING_INPUT_QUANT_CONFIG", setting)
    assert keeps_16_bits(SimpleNamespace(nvfp4_backend=Backend[name])) is kept


@pytest.mark.parametrize("format", list(FORMATS))
def test_scales_of_blocks_by_deepseeks_name(
    format: Convention, vllm_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The method for FP8 checkpoints requires every scale of experts, e.g. in an MTP layer."""
    del vllm_config
    # A CPU has no kernel for these experts.
    monkeypatch.setattr(fp8, "select_fp8_moe_backend", lambda **_: (None, None))
    monkeypatch.setattr(fp8, "RoutedExperts", Layer)
    sizes = dict.fromkeys(("intermediate_size", "intermediate_size_per_partition"), 128)
    layer = Layer(w13_num_shards=2, hidden_dim=256, tp_size=1, moe_backend="auto", **sizes)
    group = LayerGroup("the headers", Kind.FP8_BLOCK, None, {}, "dynamic", INVERSE_SCALE)
    checkpoint = CheckpointConfig(FORMATS[format], weight_only=True)
    method, name = vllm_experts(layer, PREFIX, group, checkpoint, Startup())
    assert name == "Fp8MoEMethod"
    method.create_weights(layer, E, 256, 128, torch.bfloat16, weight_loader=lambda *_, **__: True)
    assert tuple(layer.w13_weight_scale_inv.shape) == (E, 2, 2)
    assert tuple(layer.w2_weight_scale_inv.shape) == (E, 2, 1)
    for shard, part in (("w1", "w13"), ("w3", "w13"), ("w2", "w2")):
        for tensor in ("weight", INVERSE_SCALE):
            parameter = getattr(layer, f"{part}_{tensor}")
            for expert in range(E - (tensor != "weight" and shard == "w2")):
                name = f"{PREFIX}.{part}_{tensor}"
                parameter.weight_loader(parameter, parameter[expert], name, shard, expert)
    missing = rf"{PREFIX}\.{E - 1}\.down_proj\.weight_scale_inv: not in the checkpoint"
    with pytest.raises(UnsupportedCheckpoint, match=missing):
        method.process_weights_after_loading(layer)
