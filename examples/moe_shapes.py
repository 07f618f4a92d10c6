"""Shapes of mixture-of-experts models as ``config.json`` writes them."""

from typing import Any


def _qwen3_moe(
    hidden: int, moe_intermediate: int, layers: int, heads: int, kv_heads: int, *,
    experts: int, top_k: int, vocabulary: int, head_dim: int = 128,
) -> dict[str, Any]:  # fmt: skip
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,  # unused: every layer has experts
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
