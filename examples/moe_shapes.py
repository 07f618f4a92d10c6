"""Shapes of mixtures of experts, and checkpoints of random NVFP4 weights that pass for them.

Tokens choose among the experts of random weights about alike; vLLM's dummy weights would send all
of them to the same few.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from nvfp4_kernels.nvfp4 import BLOCK_SIZE
from vllm_fp4_plugin.formats import FORMATS

_KEPT = ["lm_head", "model.layers.*.mlp.gate"]
_CODE_RMS = 2.93  # of E2M1 values whose bits are random
_SCALES = (0.5, 1.0)  # block scales are spread over it


def _qwen3_moe(
    hidden: int, moe_intermediate: int, layers: int, heads: int, kv_heads: int, *,
    experts: int, top_k: int, vocabulary: int, head_dim: int = 128,
) -> dict[str, Any]:  # fmt: skip
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,  # of layers without experts: there are none
        "moe_intermediate_size": moe_intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": vocabulary,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "dtype": "bfloat16",
    }


MOE_SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-30b": _qwen3_moe(2048, 768, 48, 32, 4, experts=128, top_k=8, vocabulary=151936),
    "tiny-moe": _qwen3_moe(
        128, 64, 2, 4, 2, experts=8, top_k=2, vocabulary=1024, head_dim=32
    ),
}  # fmt: skip


def write_checkpoint(folder: Path, shape: str) -> Path:
    """Write a checkpoint in ModelOpt's format, W4A4, unless it is there; returns ``folder``.

    All layers hold the same random weights, which keep what passes through them of one size.

    Args:
        folder: to make; its parent is there.
        shape: a key of ``MOE_SHAPES``.
    """
    if (folder / "config.json").exists():
        return folder
    folder.mkdir()
    config = MOE_SHAPES[shape]
    generator = torch.Generator().manual_seed(0)
    layer = dict(_layer(config, generator))
    count = config["num_hidden_layers"]
    for number in range(count):
        tensors = {f"model.layers.{number}.{name}": tensor for name, tensor in layer.items()}
        save_file(tensors, folder / f"model-{number + 1:05}-of-{count + 1:05}.safetensors")
    table = (config["vocab_size"], config["hidden_size"])
    ends = {
        "model.embed_tokens.weight": _normal(table, 1.0, generator),
        "lm_head.weight": _normal(table, config["hidden_size"] ** -0.5, generator),
        "model.norm.weight": torch.ones(config["hidden_size"], dtype=torch.bfloat16),
    }
    save_file(ends, folder / f"model-{count + 1:05}-of-{count + 1:05}.safetensors")
    quantization = FORMATS["modelopt"].config(_KEPT, weight_only=False, fp8_kv=False)
    text = json.dumps(config | {"quantization_config": quantization}, indent=2)
    (folder / "config.json").write_text(text + "\n")
    return folder


def _layer(config: dict[str, Any], generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    head, experts = config["head_dim"], config["num_experts"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    linears = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
    }
    for expert in range(experts):
        linears |= {
            f"mlp.experts.{expert}.gate_proj": (inner, hidden),
            f"mlp.experts.{expert}.up_proj": (inner, hidden),
            f"mlp.experts.{expert}.down_proj": (hidden, inner),
        }
    for name, (n, k) in linears.items():
        for part, tensor in _nvfp4(n, k, generator).items():
            yield f"{name}.{part}", tensor
    yield "mlp.gate.weight", _normal((experts, hidden), hidden**-0.5, generator)
    for norm, width in (
        ("input_layernorm", hidden), ("post_attention_layernorm", hidden),
        ("self_attn.q_norm", head), ("self_attn.k_norm", head),
    ):  # fmt: skip
        yield f"{norm}.weight", torch.ones(width, dtype=torch.bfloat16)


def _nvfp4(n: int, k: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Tensors of an ``(n, k)`` matrix beside its name, of values near ``k ** -0.5``."""
    low, high = _SCALES
    scales = torch.empty(n, k // BLOCK_SIZE).uniform_(low, high, generator=generator)
    return {
        "weight": torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator),
        "weight_scale": scales.to(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(1 / (_CODE_RMS * math.sqrt(k) * (low + high) / 2)),
        "input_scale": torch.tensor(2.0**-9),
    }


def _normal(shape: tuple[int, int], deviation: float, generator: torch.Generator) -> Tensor:
    return (torch.randn(shape, generator=generator) * deviation).bfloat16()
