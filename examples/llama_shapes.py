"""Shapes of Llama models as ``config.json`` writes them, for measuring without a checkpoint."""

import json
from pathlib import Path
from typing import Any


def _llama(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, head_dim: int = 128
) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "dtype": "bfloat16",
    }


# llama-70b-tp4 is one GPU's part of four, without embeddings, head and communication.
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": _llama(4096, 14336, 32, heads=32, kv_heads=8),
    "llama-70b-tp4": _llama(8192, 7168, 80, heads=16, kv_heads=2),
    "tiny": _llama(128, 256, 2, heads=4, kv_heads=2, head_dim=32)
    | {"vocab_size": 1024, "max_position_embeddings": 2048},
}


def write_config(folder: Path, shape: str) -> Path:
    """Write the ``config.json`` of a built-in shape into ``folder``; returns ``folder``.

    Args:
        folder: existing folder.
        shape: a key of ``SHAPES``.
    """
    (folder / "config.json").write_text(json.dumps(SHAPES[shape], indent=2) + "\n")
    return folder
