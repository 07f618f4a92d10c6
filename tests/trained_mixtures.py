"""Tiny trained mixture-of-experts models, one for each kind of routing, made once.

Each model has memorised some lines: its log-probabilities are peaked, its continuation repeats the
lines, and, unlike a random network, it damps rounding errors.
"""

import hashlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.llama4.image_processing_llama4 import Llama4ImageProcessor

from tests import moe_checkpoints, tiny_llama
from tests.catalogue.facts import named
from tests.moe_reference import auto_class

LEARNT = 300  # bytes
SPREAD = 8.0  # of up's weights to gate's, beyond what training gives

# Large initial weights, so that few steps suffice.
_START: dict[str, Any] = {"initializer_range": 0.05}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 2.0,
    "original_max_position_embeddings": 128,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def _deepseek() -> PreTrainedConfig:
    """DeepSeek with the only latent size of vLLM's CPU attention, and the hub's rotation."""
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    return moe_checkpoints.deepseek(**sizes, **_START, rope_parameters=dict(_YARN))


def _llama4() -> PreTrainedConfig:
    config = AutoConfig.for_model(**named("Llama 4 (experts, vision)").config)
    config.text_config.initializer_range = _START["initializer_range"]
    return config


FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "Qwen3": lambda: moe_checkpoints.qwen3(**_START),
    "Mixtral": lambda: moe_checkpoints.mixtral(num_local_experts=8, **_START),
    "DeepSeek V3": _deepseek,
    "GLM 4": lambda: moe_checkpoints.glm4(**_START),
    "Llama 4": _llama4,
}


def trained(family: str, cache: Path) -> Path:
    """Bfloat16 checkpoint of a family, with its tokenizer, kept in ``cache``.

    In Qwen3's experts, the up weights are scaled far above the gate weights, and the down weights
    by the inverse, which leaves the results unchanged.
    """

    def write(directory: Path) -> None:
        torch.manual_seed(0)
        config = FAMILIES[family]()
        model = auto_class(config).from_config(config)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # which no gradient reaches
                buffer.uniform_(-0.1, 0.1)
        tiny_llama.learn(model, learnt(), steps=160, batch=4, rate=4e-3)
        if family == "Qwen3":
            _spread(model)
        model.bfloat16().save_pretrained(directory)
        tiny_llama.tokenizer().save_pretrained(directory)
        if family == "Llama 4":  # which no text needs
            Llama4ImageProcessor(size={"height": 56, "width": 56}).save_pretrained(directory)

    cache.mkdir(parents=True, exist_ok=True)
    name = family.lower().replace(" ", "-")
    return tiny_llama.made_once(cache / f"{name}-{_version()}", write)


def learnt() -> str:
    """Text that all tests score, and its continuation."""
    return (tiny_llama.TEXT + tiny_llama.training_text())[:LEARNT]


def _spread(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("experts.gate_up_proj"):
            parameter.data[:, parameter.shape[1] // 2 :] *= SPREAD
        elif name.endswith("experts.down_proj"):
            parameter.data /= SPREAD


def _version() -> str:
    recipe = inspect.getsource(sys.modules[__name__]) + inspect.getsource(moe_checkpoints)
    return hashlib.sha256((recipe + tiny_llama.version()).encode()).hexdigest()[:12]
