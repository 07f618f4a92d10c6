"""Activation functions of expert layers: the plugin's names and formulas."""

from typing import Any

import pytest
import torch
from vllm.model_executor.layers.activation import (
    SituAndMul,
    SwigluOAIAndMul,
    SwigluStepAndMul,
)
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from nvfp4_kernels.activation import GATED, SILU, UNGATED, Activation
from tests.test_plugin.experts.test_experts import F32, FORMULAS, Layer
from vllm_fp4_plugin.experts.plan import activation_of


def test_the_activation_of_a_layer() -> None:
    layer = Layer()
    assert activation_of(layer) == SILU
    layer.swiglu_limit, layer.swiglu_alpha, layer.swiglu_beta = 7.0, 1.702, 1.0
    assert activation_of(layer) == Activation("silu", 7.0, 1.702, 1.0)


def test_activations_are_named_as_vllm_names_them() -> None:
    for name in GATED:
        assert MoEActivation(name).is_gated
    for name in UNGATED:
        assert not MoEActivation(f"{name}_no_mul").is_gated
    assert set(FORMULAS) == {*GATED, *(f"{name}_no_mul" for name in UNGATED)}


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        ("silu", {}, Activation("silu", 9.0, 1.5, 0.5)),
        ("swigluoai", {}, Activation("swigluoai_uninterleave", 7.0, 1.702, 1.0)),
        ("swiglustep", {}, Activation("swiglustep", 7.0)),
        ("situ", {"activation_situ_linear_beta": 25.0}, Activation("situ", 25.0, 4.0)),
        ("situ", {"activation_situ_linear_beta": -1.0}, Activation("situ", None, 4.0)),
        ("situ", {"activation_situ_linear_beta": None}, Activation("situ", None, 4.0)),
    ],
)
def test_activations_of_layers(name: str, config: dict[str, Any], expected: Activation) -> None:
    layer = Layer(activation=MoEActivation(name), activation_situ_beta=4.0, **config)
    layer.swiglu_limit, layer.swiglu_alpha, layer.swiglu_beta = 9.0, 1.5, 0.5
    assert activation_of(layer) == expected


@pytest.mark.parametrize("name", ["situ", "swiglustep", "swigluoai"])
def test_activations_are_vllms(name: str, vllm_config: Any) -> None:
    """Values equal those of vLLM's own classes, with gate and up in vLLM's layout."""
    config = {"activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0}
    activation = activation_of(Layer(activation=MoEActivation(name), **config))
    gate, up = (torch.randn(5, 48, dtype=F32) * 8 for _ in range(2))
    theirs = {
        "situ": SituAndMul(4.0, 25.0, compile_native=False),
        "swiglustep": SwigluStepAndMul(7.0),
        "swigluoai": SwigluOAIAndMul(),
    }[name]
    alternate = name == "swigluoai"
    joined = torch.stack([gate, up], -1 if alternate else 1).flatten(1)
    torch.testing.assert_close(activation.gated(gate, up), theirs.forward_native(joined))
