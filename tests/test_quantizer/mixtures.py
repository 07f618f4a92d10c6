"""Tiny random mixtures of experts, one for each family that transformers builds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    Gemma4TextConfig,
    Llama4TextConfig,
    NemotronHConfig,
    PreTrainedConfig,
    Qwen3_5MoeTextConfig,
)

from tests import moe_checkpoints
from tests.test_quantizer.checkpoints import change_config, read_tensors, save_tokenizer

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def deepseek_v2() -> PreTrainedConfig:
    """DeepSeek V2: grouped softmax routing, latent attention, and a dense first layer."""
    return DeepseekV2Config(
        **{name: size for name, size in SIZES.items() if name != "head_dim"}
        | {"num_key_value_heads": 4, "n_routed_experts": 8, "n_shared_experts": 1},
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        moe_intermediate_size=48,
        intermediate_size=96,
        n_group=2,
        topk_group=1,
        topk_method="group_limited_greedy",
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
    )


def qwen3_5() -> PreTrainedConfig:
    """Qwen 3.5: linear attention, then full attention; experts with a gated shared expert."""
    return Qwen3_5MoeTextConfig(
        **SIZES,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=48,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        layer_types=["linear_attention", "full_attention"],
    )


def nemotron_h() -> PreTrainedConfig:
    """Nemotron-H: layers of Mamba, experts without a gate, attention, experts; squared ReLU."""
    return NemotronHConfig(
        **{name: size for name, size in SIZES.items() if name != "num_hidden_layers"},
        num_hidden_layers=4,
        hybrid_override_pattern="ME*E",
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        moe_intermediate_size=48,
        moe_shared_expert_intermediate_size=48,
        intermediate_size=96,
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=16,
        n_groups=1,
    )


def llama4() -> PreTrainedConfig:
    """Llama 4: stacked, transposed experts with router weights on the input; top-1."""
    return Llama4TextConfig(
        **SIZES,
        num_local_experts=4,
        num_experts_per_tok=1,
        intermediate_size=48,
        intermediate_size_mlp=96,
        interleave_moe_layer_step=1,
    )


def gemma4() -> PreTrainedConfig:
    """Gemma 4: stacked experts with a parallel dense MLP, tanh GELU, a router scale per expert."""
    return Gemma4TextConfig(
        **SIZES,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=48,
        intermediate_size=96,
        hidden_size_per_layer_input=0,
        global_head_dim=16,
        num_global_key_value_heads=2,
        layer_types=["sliding_attention", "full_attention"],
    )


FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "Qwen3": moe_checkpoints.qwen3,
    "Mixtral": moe_checkpoints.mixtral,
    "DeepSeek V2": deepseek_v2,
    "DeepSeek V3": moe_checkpoints.deepseek,
    "GLM 4": moe_checkpoints.glm4,
    "MiniMax M2": moe_checkpoints.minimax,
    "Qwen3-Next": moe_checkpoints.qwen3_next,
    "Qwen3.5": qwen3_5,
    "Nemotron-H": nemotron_h,
    "Llama 4": llama4,
    "Gemma 4": gemma4,
}


def save_mixture(folder: Path, config: PreTrainedConfig) -> Path:
    """Save a random bfloat16 model whose experts and shards differ in magnitude."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 3 and "conv" not in name:
                parameter.normal_(std=0.2)
                parameter *= torch.linspace(1, 2, len(parameter)).view(-1, 1, 1)
            elif parameter.ndim == 2:
                parameter *= 4.0
    model.save_pretrained(folder)
    save_tokenizer(folder)
    change_config(folder, architectures=[type(model).__name__])
    return folder


def stack(folder: Path) -> None:
    """Rewrite a checkpoint with separate experts as a checkpoint with stacked experts."""
    tensors = read_tensors(folder)
    for layer in sorted({n.partition(".experts.")[0] for n in tensors if ".experts." in n}):
        numbers = range(sum(n.startswith(f"{layer}.experts.") for n in tensors) // 3)
        taken = {
            part: [tensors.pop(f"{layer}.experts.{e}.{part}_proj.weight") for e in numbers]
            for part in ("gate", "up", "down")
        }
        gate_up = [torch.cat(pair) for pair in zip(taken["gate"], taken["up"], strict=True)]
        tensors[f"{layer}.experts.gate_up_proj"] = torch.stack(gate_up)
        tensors[f"{layer}.experts.down_proj"] = torch.stack(taken["down"])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
