"""Sizes, towers and patterns that families share; head sizes are the real ones."""

from typing import Any

from vllm_fp4_plugin.formats.kind import Kind

W4A4, W4A16, FP8 = Kind.NVFP4, Kind.NVFP4_A16, Kind.FP8
MXFP8, PLAIN = Kind.MXFP8, Kind.UNQUANTIZED

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "num_hidden_layers": 2,
    "intermediate_size": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
HEADS_128 = SIZES | {"head_dim": 128}
EXPERTS = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}
MLA = (
    SIZES
    | {
        "num_key_value_heads": 4,
        "q_lora_rank": 64,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_routed_experts": 4,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 0,
    }
    | EXPERTS
)
DSA = MLA | {"index_head_dim": 128, "index_n_heads": 4, "index_topk": 64}
GDN = {
    "head_dim": 256,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "out_hidden_size": 128,
    "num_position_embeddings": 64,
}
QWEN_TOKENS = {
    "image_token_id": 300,
    "video_token_id": 301,
    "vision_start_token_id": 302,
    "vision_end_token_id": 303,
}
QWEN_VISION_DEEPSTACK = QWEN_VISION | {"deepstack_visual_indexes": [0]}
QWEN3_VL_TEXT = HEADS_128 | {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5e6,
        "mrope_section": [24, 20, 20],
        "mrope_interleaved": True,
    }
}
QWEN35_TEXT = (
    SIZES
    | GDN
    | {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        }
    }
)
QWEN35 = {
    "model_type": "qwen3_5",
    "text_config": QWEN35_TEXT,
    "vision_config": QWEN_VISION,
    **QWEN_TOKENS,
}
QWEN35_EXPERTS = QWEN35 | {
    "model_type": "qwen3_5_moe",
    "text_config": QWEN35_TEXT
    | EXPERTS
    | {"num_experts": 4, "shared_expert_intermediate_size": 64},
}
GEMMA4_TEXT = SIZES | {
    "head_dim": 256,
    "global_head_dim": 512,
    "num_hidden_layers": 6,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 320,
    "sliding_window": 64,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
GEMMA4_VISION = {
    "model_type": "gemma4_vision",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
GEMMA4 = {
    "model_type": "gemma4",
    "text_config": GEMMA4_TEXT,
    "vision_config": GEMMA4_VISION,
    "image_token_id": 300,
    "video_token_id": 301,
    "audio_token_id": 302,
    "boi_token_id": 303,
    "eoi_token_id": 304,
}
GEMMA4_UNIFIED = {
    "model_type": "gemma4_unified",
    "text_config": {
        name: value
        for name, value in GEMMA4_TEXT.items()
        if name not in ("hidden_size_per_layer_input", "vocab_size_per_layer_input")
    },
    "vision_config": {"mm_embed_dim": 64, "output_proj_dims": 64, "mm_posemb_size": 64},
    "audio_config": {"audio_embed_dim": 64},
    "image_token_id": 300,
    "video_token_id": 301,
    "audio_token_id": 302,
    "boi_token_id": 303,
    "eoi_token_id": 304,
    "boa_token_id": 305,
    "eoa_token_index": 306,
}
GEMMA4_EXPERTS = GEMMA4 | {
    "text_config": GEMMA4_TEXT
    | {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
    }
}
DIFFUSION_GEMMA = {
    "model_type": "diffusion_gemma",
    "canvas_length": 16,
    "text_config": SIZES
    | {
        "head_dim": 256,
        "num_hidden_layers": 6,
        "sliding_window": 64,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "per_layer_config": {"5": {"head_dim": 512}},
    },
    "vision_config": GEMMA4_VISION,
    "image_token_id": 300,
    "boi_token_id": 303,
    "eoi_token_id": 304,
}
NEMOTRON_H = SIZES | {
    "model_type": "nemotron_h",
    "head_dim": 128,
    "ssm_state_size": 128,
    "mamba_num_heads": 8,
    "mamba_head_dim": 64,
    "n_groups": 2,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
}
NEMOTRON_EXPERTS = NEMOTRON_H | {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    "n_routed_experts": 4,
    "moe_shared_expert_intermediate_size": 64,
    **EXPERTS,
}
PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 32,
    "image_size": 56,
    "patch_size": 14,
}

DEEPSEEK_ROUTER = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}

HEAD: dict[str, Kind] = {"*lm_head": PLAIN}
ROUTER: dict[str, Kind] = {"*.mlp.gate": PLAIN, "*.mlp.shared_expert_gate": PLAIN}
TOWERS: dict[str, Kind] = {
    "*visual*": PLAIN,
    "*vision_tower*": PLAIN,
    "*vision_model*": PLAIN,
    "*multi_modal_projector*": PLAIN,
}
UNIFORM = HEAD | {"*": W4A4}
UNIFORM_EXPERTS = HEAD | ROUTER | {"*": W4A4}
EXPERTS_ONLY = HEAD | TOWERS | ROUTER | {"*self_attn*": PLAIN, "*": W4A4}
GDN_PLAIN: dict[str, Kind] = {"*.in_proj_a": PLAIN, "*.in_proj_b": PLAIN, "*.in_proj_ba": PLAIN}

QWEN4_EXP = {
    "model_type": "qwen4_exp",
    "text_config": SIZES
    | GDN
    | EXPERTS
    | {
        "num_experts": 4,
        "shared_expert_intermediate_size": 64,
        "output_gate_type": "silu",
        "hc_lowrank": 32,
        "ple_layer_ids": [2],
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 64,
        "make_ngram_vocab_size_divisible_by": 16,
        "split_ngram_parts": 4,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 128,
        "indexer_budget": 64,
        "indexer_compress_ratio": 16,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "rope_parameters": QWEN35_TEXT["rope_parameters"],
    },
    "vision_config": QWEN_VISION,
    **QWEN_TOKENS,
}
# Values as on the hub, where transformers' class renames these fields or lacks them.
QWEN4_EXP_FIELDS = {
    "vision_config.deepstack_visual_indexes": [],
    "text_config.layer_types": ["linear_attention"] * 3 + ["full_attention"],
}
GLM5_NEXT = {
    "model_type": "glm5_next",
    "text_config": SIZES
    | EXPERTS
    | {
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 64,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 256,
        "v_head_dim": 256,
        "n_routed_experts": 4,
        "linear_num_heads": 4,
        "index_n_heads": 4,
        "index_topk": 64,
        "mlp_layer_types": ["dense"] * 3 + ["sparse"],
    },
    "vision_config": {
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": 128,
        "projection_intermediate_size": 128,
        "image_size": 56,
    },
    "image_token_id": 300,
    "video_token_id": 301,
}
KIMI_K3 = SIZES | {
    "model_type": "kimi_linear",
    "num_key_value_heads": 4,
    "linear_num_heads": 4,
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse"],
}
QWEN35_EXPERTS_TEXT = QWEN35_TEXT | {
    "model_type": "qwen3_5_moe_text",
    **EXPERTS,
    "num_experts": 4,
    "shared_expert_intermediate_size": 64,
}
