"""Facts of the families: one table, from which all else is made.

Checkpoints are those of the recipes of the vLLM project (August 2026) and, after them, others that
people name. What a checkpoint leaves in 16 bits is what its config lists; head sizes are real.
"""

from typing import Any

from tests.catalogue.family import Family
from vllm_fp4_plugin.kind import Kind

W4A4, W4A16, FP8 = Kind.NVFP4, Kind.NVFP4_A16, Kind.FP8
MXFP8, PLAIN = Kind.MXFP8, Kind.UNQUANTIZED

_SIZES: dict[str, Any] = {
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
_HEADS_128 = _SIZES | {"head_dim": 128}
_EXPERTS = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}
_MLA = (
    _SIZES
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
    | _EXPERTS
)
_DSA = _MLA | {"index_head_dim": 128, "index_n_heads": 4, "index_topk": 64}
_GDN = {
    "head_dim": 256,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "out_hidden_size": 128,
    "num_position_embeddings": 64,
}
_QWEN_TOKENS = {
    "image_token_id": 300,
    "video_token_id": 301,
    "vision_start_token_id": 302,
    "vision_end_token_id": 303,
}
_QWEN35 = {
    "model_type": "qwen3_5",
    "text_config": _SIZES | _GDN,
    "vision_config": _QWEN_VISION,
    **_QWEN_TOKENS,
}
_QWEN35_EXPERTS = _QWEN35 | {
    "model_type": "qwen3_5_moe",
    "text_config": _SIZES
    | _GDN
    | _EXPERTS
    | {"num_experts": 4, "shared_expert_intermediate_size": 64},
}
_GEMMA4_TEXT = _SIZES | {
    "head_dim": 256,
    "global_head_dim": 512,
    "num_hidden_layers": 6,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 320,
    "sliding_window": 64,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
_GEMMA4_VISION = {
    "model_type": "gemma4_vision",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
_GEMMA4 = {
    "model_type": "gemma4",
    "text_config": _GEMMA4_TEXT,
    "vision_config": _GEMMA4_VISION,
    "image_token_id": 300,
    "video_token_id": 301,
    "audio_token_id": 302,
    "boi_token_id": 303,
    "eoi_token_id": 304,
}
_GEMMA4_EXPERTS = _GEMMA4 | {
    "text_config": _GEMMA4_TEXT
    | {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
    }
}
_DIFFUSION_GEMMA = {
    "model_type": "diffusion_gemma",
    "canvas_length": 16,
    "text_config": _SIZES
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
    "vision_config": _GEMMA4_VISION,
    "image_token_id": 300,
    "boi_token_id": 303,
    "eoi_token_id": 304,
}
_NEMOTRON_H = _SIZES | {
    "model_type": "nemotron_h",
    "head_dim": 128,
    "ssm_state_size": 128,
    "mamba_num_heads": 8,
    "mamba_head_dim": 64,
    "n_groups": 2,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
}
_NEMOTRON_EXPERTS = _NEMOTRON_H | {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    "n_routed_experts": 4,
    "moe_shared_expert_intermediate_size": 64,
    **_EXPERTS,
}
_PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 32,
    "image_size": 56,
    "patch_size": 14,
}

_DEEPSEEK_ROUTER = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}

_HEAD: dict[str, Kind] = {"*lm_head": PLAIN}
_ROUTER: dict[str, Kind] = {"*.mlp.gate": PLAIN, "*.mlp.shared_expert_gate": PLAIN}
_TOWERS: dict[str, Kind] = {
    "*visual*": PLAIN,
    "*vision_tower*": PLAIN,
    "*vision_model*": PLAIN,
    "*multi_modal_projector*": PLAIN,
}
_UNIFORM = _HEAD | {"*": W4A4}
_UNIFORM_EXPERTS = _HEAD | _ROUTER | {"*": W4A4}
_EXPERTS_ONLY = _HEAD | _TOWERS | _ROUTER | {"*self_attn*": PLAIN, "*": W4A4}
_GDN_PLAIN: dict[str, Kind] = {"*.in_proj_a": PLAIN, "*.in_proj_b": PLAIN, "*.in_proj_ba": PLAIN}

LLAMA = Family(
    "Llama 3",
    (
        "nvidia/Llama-3.1-8B-Instruct-NVFP4",
        "nvidia/Llama-3.3-70B-Instruct-NVFP4",
        "nvidia/Llama-3.1-405B-Instruct-NVFP4",
    ),
    _HEADS_128 | {"model_type": "llama"},
    _UNIFORM,
    fp8_kv=True,
    ran="test_engine.py::test_modelopt",
)

FAMILIES: tuple[Family, ...] = (
    LLAMA,
    Family(
        "Qwen 3 (dense)",
        (
            "nvidia/Qwen3-8B-NVFP4",
            "nvidia/Qwen3-14B-NVFP4",
            "nvidia/Qwen3-32B-NVFP4",
        ),
        _HEADS_128 | {"model_type": "qwen3"},
        _UNIFORM,
        fp8_kv=True,
        ran="test_model_families.py::test_log_probabilities",
    ),
    Family(
        "Qwen 3 (dense), compressed-tensors",
        (
            "RedHatAI/Qwen3-4B-NVFP4",
            "RedHatAI/Qwen3-8B-NVFP4",
            "RedHatAI/Qwen3-14B-NVFP4",
            "RedHatAI/Qwen3-32B-NVFP4",
        ),
        _HEADS_128 | {"model_type": "qwen3"},
        _UNIFORM,
        format="compressed-tensors",
        ran="test_model_families.py::test_log_probabilities",
    ),
    Family(
        "Qwen 3.8 (hybrid GDN, vision)",
        ("Inferact/Qwen3.8-27B-NVFP4",),
        _QWEN35,
        _HEAD | _TOWERS | _GDN_PLAIN | {"*": W4A4},
        multimodal=True,
        ran="test_model_families.py::test_log_probabilities",
    ),
    Family(
        "Qwen 3.5 (hybrid GDN, vision), compressed-tensors",
        ("Sehyo/Qwen3.5-27B-NVFP4",),
        _QWEN35,
        _HEAD | _TOWERS | {"*linear_attn*": PLAIN, "*": W4A4},
        format="compressed-tensors",
        multimodal=True,
        ran="test_model_families.py::test_log_probabilities",
    ),
    Family(
        "Qwen 3.6 (hybrid GDN, vision), mixed",
        ("nvidia/Qwen3.6-27B-NVFP4",),
        _QWEN35,
        _HEAD | _TOWERS | _GDN_PLAIN | {"*.mlp.*": W4A16, "*": FP8},
        fp8_kv=True,
        multimodal=True,
        ran="test_model_families.py::test_log_probabilities",
    ),
    Family(
        "Qwen 3.6 and 3.8 (hybrid GDN, vision), mixed with lm_head",
        ("RadixArk/Qwen3.8-27B-NVFP4", "nvidia/Qwen3.6-27B-NVFP4 (later exports)"),
        _QWEN35,
        _TOWERS | _GDN_PLAIN | {"*.mlp.*": W4A16, "lm_head": W4A16, "*": FP8},
        fp8_kv=True,
        multimodal=True,
        ran="test_model_families.py::test_log_probabilities",
    ),
    Family(
        "Qwen 3.6 and 3.8 (hybrid GDN, vision), mixed compressed-tensors",
        ("unsloth/Qwen3.6-27B-NVFP4", "unsloth/Qwen3.8-27B-NVFP4"),
        _QWEN35,
        _TOWERS | _GDN_PLAIN | {"*.mlp.*": W4A4, "*": Kind.FP8_CHANNEL},
        format="compressed-tensors",
        multimodal=True,
        ran="test_model_families.py::test_log_probabilities",
    ),
    Family(
        "Muse Glimmer",
        ("Inferact/Muse-Glimmer-30B-NVFP4",),
        {
            "model_type": "muse_glimmer",
            "text_config": _HEADS_128,
            "vision_config": {
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
            },
            "out_hidden_size": 256,
            "projector_hidden_size": 64,
            "image_token_id": 300,
            "video_token_id": 301,
        },
        _HEAD | _TOWERS | {"*.vision_*": PLAIN, "*": W4A4},
        multimodal=True,
        fields={"vision_config.output_dim": 256, "vision_config.adapter_dim": 64},
        ran="test_model_families.py::test_log_probabilities",
    ),
    Family(
        "Nemotron Nano 2 (Mamba-2 hybrid)",
        ("nvidia/NVIDIA-Nemotron-Nano-9B-v2-NVFP4",),
        _NEMOTRON_H,
        _HEAD | {"*": W4A4},
        fp8_kv=True,
        ran="test_model_families.py::test_log_probabilities",
    ),
    Family(
        "Nemotron 3 Nano 4B (Mamba-2 hybrid), mixed",
        ("nvidia/NVIDIA-Nemotron-3-Nano-4B-NVFP4",),
        _NEMOTRON_H,
        {"lm_head": FP8, "backbone.layers.[13].*": W4A4, "*": FP8},
        fp8_kv=True,
        ran="test_model_families.py::test_log_probabilities",
    ),
    Family(
        "Gemma 4 (dense, vision)",
        ("nvidia/Gemma-4-31B-IT-NVFP4",),
        _GEMMA4,
        _HEAD | _TOWERS | {"*embed_vision*": PLAIN, "*self_attn*": PLAIN, "*": W4A4},
        fp8_kv=True,
        multimodal=True,
        ran="test_model_families.py::test_log_probabilities",
    ),
    Family(
        "Gemma 4 (dense, vision), compressed-tensors",
        ("RedHatAI/gemma-4-12B-it-NVFP4",),
        _GEMMA4,
        _HEAD | _TOWERS | {"*embed_vision*": PLAIN, "*": W4A4},
        format="compressed-tensors",
        multimodal=True,
        ran="test_model_families.py::test_log_probabilities",
    ),
    Family(
        "Mistral Small 3.2 (vision), compressed-tensors",
        ("RedHatAI/Mistral-Small-3.2-24B-Instruct-2506-NVFP4",),
        {
            "model_type": "mistral3",
            "text_config": _HEADS_128 | {"model_type": "mistral"},
            "vision_config": _PIXTRAL,
            "image_token_index": 10,
        },
        _HEAD | _TOWERS | {"*": W4A4},
        format="compressed-tensors",
        multimodal=True,
        ran="test_model_families.py::test_log_probabilities",
    ),
    Family(
        "Mistral Medium 3.5 (vision), mixed",
        ("nvidia/Mistral-Medium-3.5-128B-NVFP4",),
        {
            "model_type": "mistral3",
            "text_config": _HEADS_128 | {"model_type": "ministral3"},
            "vision_config": _PIXTRAL,
            "image_token_index": 10,
        },
        _HEAD | _TOWERS | {"*self_attn*": FP8, "*": W4A4},
        fp8_kv=True,
        multimodal=True,
        ran="test_model_families.py::test_log_probabilities",
    ),
    Family(
        "Qwen 2.5 VL",
        ("nvidia/Qwen2.5-VL-7B-Instruct-NVFP4", "RedHatAI/Qwen2.5-VL-7B-Instruct-NVFP4"),
        {
            "model_type": "qwen2_5_vl",
            # Its heads have 128 elements, by these numbers alone.
            "text_config": _SIZES
            | {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1},
            "vision_config": {
                "depth": 1,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_heads": 2,
                "out_hidden_size": 256,
                "fullatt_block_indexes": [0],
            },
            **_QWEN_TOKENS,
        },
        _HEAD | _TOWERS | {"*": W4A4},
        multimodal=True,
        ran="test_model_families.py::test_log_probabilities",
    ),
    # --- mixtures of experts --------------------------------------------------------------------
    Family(
        "Qwen 3 (experts)",
        (
            "nvidia/Qwen3-235B-A22B-Instruct-2507-NVFP4",
            "nvidia/Qwen3-Coder-480B-A35B-Instruct-NVFP4",
        ),
        _HEADS_128 | _EXPERTS | {"model_type": "qwen3_moe", "num_experts": 4},
        _UNIFORM_EXPERTS,
        fp8_kv=True,
        ran="test_experts_engine.py::test_qwen3_w4a4",
    ),
    Family(
        "Qwen 3 Next (hybrid GDN, experts)",
        ("nvidia/Qwen3-Next-80B-A3B-Instruct-NVFP4",),
        _SIZES
        | _GDN
        | _EXPERTS
        | {
            "model_type": "qwen3_next",
            "num_experts": 4,
            "shared_expert_intermediate_size": 64,
        },
        _HEAD | _ROUTER | {"*self_attn*": PLAIN, "*linear_attn*": PLAIN, "*": W4A4},
    ),
    Family(
        "Qwen 3 VL (experts, vision)",
        ("nvidia/Qwen3-VL-235B-A22B-Instruct-NVFP4",),
        {
            "model_type": "qwen3_vl_moe",
            "text_config": _HEADS_128 | _EXPERTS | {"num_experts": 4},
            "vision_config": _QWEN_VISION | {"deepstack_visual_indexes": [0]},
            **_QWEN_TOKENS,
        },
        _HEAD | _TOWERS | _ROUTER | {"*": W4A4},
        multimodal=True,
        fields={"text_config.norm_topk_prob": True},
    ),
    Family(
        "Qwen 3.5 and 3.8 (hybrid GDN, experts, vision)",
        (
            "nvidia/Qwen3.5-397B-A17B-NVFP4",
            "Inferact/Qwen3.8-2.4T-A95B-NVFP4",
        ),
        _QWEN35_EXPERTS,
        _HEAD | _TOWERS | _ROUTER | {"*self_attn*": PLAIN, "*linear_attn*": PLAIN, "*": W4A4},
        multimodal=True,
    ),
    Family(
        "Qwen 3.6 and 3.8 (hybrid GDN, experts, vision), mixed with lm_head",
        ("nvidia/Qwen3.6-35B-A3B-NVFP4", "nvidia/Qwen3.8-Flash-Next-NVFP4"),
        _QWEN35_EXPERTS,
        _TOWERS
        | _ROUTER
        | _GDN_PLAIN
        | {"lm_head": W4A16, "*.mlp.experts.*": W4A16, "*shared_expert*": W4A16, "*": FP8},
        fp8_kv=True,
        multimodal=True,
    ),
    Family(
        "GLM 4.7",
        ("nvidia/GLM-4.7-NVFP4",),
        _HEADS_128
        | _EXPERTS
        | {
            "model_type": "glm4_moe",
            "n_routed_experts": 4,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
            "attention_bias": True,
            "num_nextn_predict_layers": 0,
        },
        _EXPERTS_ONLY,
        ran="test_experts_engine.py::test_glm4_of_mixed_precision",
    ),
    Family(
        "Gemma 4 (experts, vision)",
        ("nvidia/Gemma-4-26B-A4B-NVFP4",),
        _GEMMA4_EXPERTS,
        _HEAD
        | _TOWERS
        | {"*embed_vision*": PLAIN, "*router*": PLAIN, "*self_attn*": PLAIN, "*": W4A4},
        fp8_kv=True,
        multimodal=True,
    ),
    Family(
        "Gemma 4 (experts, vision), compressed-tensors",
        ("RedHatAI/gemma-4-26B-A4B-it-NVFP4",),
        _GEMMA4_EXPERTS,
        _HEAD | _TOWERS | {"*embed_vision*": PLAIN, "*router*": PLAIN, "*": W4A4},
        format="compressed-tensors",
        multimodal=True,
    ),
    Family(
        "Llama 4 (experts, vision)",
        ("nvidia/Llama-4-Scout-17B-16E-Instruct-NVFP4",),
        {
            "model_type": "llama4",
            "text_config": _HEADS_128
            | {
                "intermediate_size_mlp": 256,
                "intermediate_size": 64,
                "num_local_experts": 4,
                "attention_chunk_size": 128,
            },
            "vision_config": {
                "hidden_size": 64,
                "intermediate_size": 256,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "vision_output_dim": 64,
                "projector_input_dim": 64,
                "projector_output_dim": 64,
                "image_size": 56,
            },
        },
        _HEAD | _TOWERS | {"*router*": PLAIN, "*self_attn*": PLAIN, "*": W4A4},
        fp8_kv=True,
        multimodal=True,
        stacked=True,
    ),
    Family(
        "MiniMax M2",
        ("nvidia/MiniMax-M2.5-NVFP4", "nvidia/MiniMax-M2.7-NVFP4"),
        _HEADS_128
        | {
            "model_type": "minimax_m2",
            "intermediate_size": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        _HEAD | {"*.block_sparse_moe.gate": PLAIN, "*self_attn*": PLAIN, "*": W4A4},
        fields={"rotary_dim": 64, "scoring_func": "sigmoid", "use_routing_bias": True},
    ),
    Family(
        "MiniMax M2, compressed-tensors",
        ("RedHatAI/MiniMax-M2-NVFP4",),
        _HEADS_128
        | {
            "model_type": "minimax_m2",
            "intermediate_size": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        _HEAD | {"*.block_sparse_moe.gate": PLAIN, "*self_attn*": PLAIN, "*": W4A4},
        format="compressed-tensors",
        fields={"rotary_dim": 64, "scoring_func": "sigmoid", "use_routing_bias": True},
    ),
    Family(
        "Trinity",
        ("arcee-ai/Trinity-Large-NVFP4",),
        _HEADS_128
        | _EXPERTS
        | {
            "model_type": "afmoe",
            "num_dense_layers": 1,
            "num_experts": 4,
            "num_shared_experts": 1,
            "sliding_window": 64,
        },
        _HEAD | {"*.router.gate": PLAIN, "*": W4A4},
        fields={"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    ),
    Family(
        "Laguna",
        (
            "poolside/Laguna-XS-NVFP4",
            "poolside/Laguna-S-NVFP4",
            "poolside/Laguna-M-NVFP4",
            "poolside/Laguna-L-NVFP4",
        ),
        _HEADS_128
        | _EXPERTS
        | {
            "model_type": "laguna",
            "num_experts": 4,
            "shared_expert_intermediate_size": 64,
            "sliding_window": 64,
        },
        _HEAD | _ROUTER | {"*self_attn*": PLAIN, "*": W4A4},
    ),
    Family(
        "Step 3.7 Flash (experts, vision)",
        ("stepfun-ai/Step-3.7-Flash-NVFP4",),
        {
            "model_type": "step3p7",
            "text_config": _HEADS_128
            | {
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 64,
                "mlp_layer_types": ["dense", "sparse"],
                "share_expert_dim": 64,
            },
            "vision_config": {
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 56,
            },
            "image_token_id": 300,
        },
        _EXPERTS_ONLY | {"*.moe.gate": PLAIN, "vit_large_projector": PLAIN, "*": W4A4},
        multimodal=True,
        by_headers="output_dim",
    ),
    Family(
        "Nemotron 3 Nano Omni (Mamba-2 hybrid, experts)",
        ("nvidia/NVIDIA-Nemotron-3-Nano-Omni-30B-NVFP4",),
        _NEMOTRON_EXPERTS,
        _HEAD | {"*.mixer.gate": PLAIN, "*.mixer.[qkvo]_proj": PLAIN, "*": W4A4},
        fp8_kv=True,
        by_headers="is_act_and_mul=False is supported only for CUDA",
        only_gpu=True,
    ),
    Family(
        "Nemotron 3 Super and Ultra (Mamba-2 hybrid, latent experts), mixed",
        (
            "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4",
            "nvidia/NVIDIA-Nemotron-3-Ultra-550B-NVFP4",
        ),
        _NEMOTRON_EXPERTS | {"moe_latent_size": 64},
        _HEAD
        | {
            "*.mixer.gate": PLAIN,
            "*latent*": PLAIN,
            "*.mixer.[qkvo]_proj": PLAIN,
            "*.mixer.experts.*": W4A4,
            "*": FP8,
        },
        fp8_kv=True,
        by_headers="is_act_and_mul=False is supported only for CUDA",
        only_gpu=True,
    ),
    Family(
        "Nemotron 3.5 Lightning (Mamba-2 hybrid, experts), mixed with lm_head",
        ("nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-NVFP4",),
        _NEMOTRON_EXPERTS,
        {
            "*.mixer.gate": PLAIN,
            "*.mixer.[qkvo]_proj": PLAIN,
            "lm_head": W4A16,
            "*experts.*": W4A16,
            "*": FP8,
        },
        fp8_kv=True,
        by_headers="is_act_and_mul=False is supported only for CUDA",
        only_gpu=True,
    ),
    Family(
        "DeepSeek R1, V3.1 (MLA, experts)",
        ("nvidia/DeepSeek-R1-0528-NVFP4-v2", "nvidia/DeepSeek-V3.1-NVFP4"),
        _MLA | {"model_type": "deepseek_v3"},
        _EXPERTS_ONLY,
        fp8_kv=True,
        fields=_DEEPSEEK_ROUTER,
    ),
    Family(
        "Kimi K2 Thinking (MLA, experts)",
        ("nvidia/Kimi-K2-Thinking-NVFP4",),
        _MLA | {"model_type": "deepseek_v3"},
        _EXPERTS_ONLY,
        fields=_DEEPSEEK_ROUTER,
    ),
    Family(
        "Kimi K2.5, K2.6 (MLA, experts, vision)",
        ("nvidia/Kimi-K2.5-NVFP4", "nvidia/Kimi-K2.6-NVFP4"),
        {
            "model_type": "kimi_k25",
            "text_config": _MLA | {"model_type": "deepseek_v3"},
            "vision_config": {
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
            },
            "projection_hidden_size": 64,
        },
        _EXPERTS_ONLY,
        multimodal=True,
        renamed={r"language_model\.model\.blocks": "language_model.model.layers"},
        by_headers="image processor",
    ),
    Family(
        "DeepSeek V3.2 (MLA, sparse attention, experts)",
        ("nvidia/DeepSeek-V3.2-NVFP4",),
        _DSA | {"model_type": "deepseek_v32"},
        _EXPERTS_ONLY,
        by_headers="Sparse Attention is not supported on CPU",
        only_gpu=True,
    ),
    Family(
        "GLM 5, 5.1 (MLA, sparse attention, experts)",
        ("nvidia/GLM-5-NVFP4", "nvidia/GLM-5.1-NVFP4"),
        _DSA | {"model_type": "glm_moe_dsa"},
        _EXPERTS_ONLY,
        by_headers="Sparse Attention is not supported on CPU",
        only_gpu=True,
    ),
    Family(
        "GLM 5.2 (MLA, sparse attention, experts), mixed",
        ("nvidia/GLM-5.2-NVFP4",),
        _DSA | {"model_type": "glm_moe_dsa"},
        _HEAD | _ROUTER | {"*.mlp.experts.*": W4A4, "*indexer*": PLAIN, "*": FP8},
        by_headers="Sparse Attention is not supported on CPU",
        only_gpu=True,
    ),
    Family(
        "Mistral Small 4 (MLA, experts, vision), compressed-tensors",
        ("mistralai/Mistral-Small-4-119B-NVFP4",),
        {
            "model_type": "mistral3",
            "text_config": _MLA
            | {"model_type": "mistral4", "qk_nope_head_dim": 64, "first_k_dense_replace": 0},
            "vision_config": _PIXTRAL,
            "image_token_index": 10,
        },
        _EXPERTS_ONLY,
        format="compressed-tensors",
        multimodal=True,
        by_headers="No model architectures",
    ),
    Family(
        "MiniMax M3 (experts, vision), mixed",
        ("nvidia/MiniMax-M3-NVFP4",),
        {
            "model_type": "minimax_m3_vl",
            "text_config": _HEADS_128
            | {
                "intermediate_size": 64,
                "dense_intermediate_size": 256,
                "shared_intermediate_size": 64,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
            },
            "vision_config": {
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 56,
            },
            "projector_hidden_size": 64,
        },
        _HEAD | _TOWERS | {"*gate": PLAIN, "*.experts.*": W4A4, "*": MXFP8},
        multimodal=True,
        by_headers="img_token_compression_config",
    ),
    Family(
        "Hy3 (experts), mixed compressed-tensors",
        ("RedHatAI/Hy3-NVFP4-FP8",),
        _HEADS_128 | _EXPERTS | {"model_type": "hy_v3", "num_experts": 4, "num_shared_experts": 1},
        _HEAD | {"*gate": PLAIN, "*.experts.*": W4A4, "*": Kind.FP8_CHANNEL},
        format="compressed-tensors",
        fields={
            "first_k_dense_replace": 1,
            "expert_hidden_dim": 64,
            "route_norm": True,
            "qk_norm": True,
        },
    ),
    Family(
        "DeepSeek V4 (sparse attention, experts), mixed",
        ("nvidia/DeepSeek-V4-Flash-NVFP4", "nvidia/DeepSeek-V4-Pro-NVFP4"),
        {
            "model_type": "deepseek_v4",
            **_SIZES,
            **_EXPERTS,
            "num_key_value_heads": 1,
            "head_dim": 512,
            "q_lora_rank": 64,
            "n_routed_experts": 4,
            "o_groups": 2,
            "o_lora_rank": 64,
            "index_n_heads": 4,
            "index_topk": 64,
            "sliding_window": 64,
            "num_nextn_predict_layers": 0,
        },
        _HEAD | _ROUTER | {"*.experts.*": W4A4, "*": FP8},
        by_headers="mlp_layer_types",
    ),
    Family(
        "Inkling (experts, vision, audio)",
        ("Inkling", "Inkling-Small"),
        {
            "model_type": "inkling_mm_model",
            "text_config": _HEADS_128
            | {
                "swa_num_attention_heads": 4,
                "swa_num_key_value_heads": 2,
                "moe_intermediate_size": 64,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "n_shared_experts": 1,
            },
            "vision_config": {
                "text_hidden_size": 128,
                "hidden_size": 64,
                "n_layers": 1,
                "num_attention_heads": 2,
            },
            "audio_config": {"text_hidden_size": 128, "mel_vocab_size": 16},
        },
        {"*.experts.w*": W4A4, "*": PLAIN},
        stacked=True,
        multimodal=True,
    ),
    Family(
        "Nemotron Nano 2 VL (Mamba-2 hybrid, vision)",
        ("nvidia/NVIDIA-Nemotron-Nano-12B-v2-VL-NVFP4-QAD",),
        _NEMOTRON_H,
        _HEAD | {"*": W4A4},
        architecture="NemotronH_Nano_VL_V2",
        renamed={"^": "language_model."},
        by_headers="has no attribute 'text_config'",
    ),
    Family(
        "DiffusionGemma (experts)",
        ("nvidia/diffusiongemma-26B-A4B-it-NVFP4",),
        _DIFFUSION_GEMMA,
        _HEAD
        | _TOWERS
        | {"*embed_vision*": PLAIN, "*router*": PLAIN, "*self_attn*": PLAIN, "*": W4A4},
        multimodal=True,
        by_headers="does not support: diffusion models",
        only_gpu=True,
    ),
    Family(
        "DiffusionGemma (experts), compressed-tensors",
        ("RedHatAI/diffusiongemma-26B-A4B-it-NVFP4",),
        _DIFFUSION_GEMMA,
        _HEAD | _TOWERS | {"*embed_vision*": PLAIN, "*router*": PLAIN, "*": W4A4},
        format="compressed-tensors",
        multimodal=True,
        by_headers="does not support: diffusion models",
        only_gpu=True,
    ),
    Family(
        "Kimi K3 (linear attention, MLA, experts, vision), compressed-tensors",
        ("RedHatAI/Kimi-K3-NVFP4",),
        _SIZES
        | {
            "model_type": "kimi_linear",
            "num_key_value_heads": 4,
            "linear_num_heads": 4,
            "moe_intermediate_size": 64,
            "num_experts": 4,
            "num_experts_per_token": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse"],
        },
        _EXPERTS_ONLY,
        format="compressed-tensors",
        architecture="KimiK3ForConditionalGeneration",
        renamed={"^": "language_model."},
        by_headers="Invalid type of HuggingFace config",
    ),
    Family(
        "Mistral Large 3 (MLA, experts, vision), compressed-tensors",
        ("mistralai/Mistral-Large-3-675B-Instruct-2512-NVFP4",),
        _MLA | {"model_type": "deepseek_v3"},
        {"output": PLAIN, "*.gate": PLAIN, "*.attention.*": PLAIN, "*": W4A4},
        format="compressed-tensors",
        architecture="MistralLarge3ForCausalLM",
        renamed={
            r"^model\.layers": "layers",
            r"^model\.embed_tokens": "tok_embeddings",
            "^lm_head": "output",
            r"\.self_attn\.q_(a|b)_proj": r".attention.wq_\1",
            r"\.self_attn\.kv_b_proj": ".attention.wkv_b",
            r"\.self_attn\.kv_a_proj_with_mqa": ".attention.wkv_a_with_mqa",
            r"\.self_attn\.o_proj": ".attention.wo",
            r"\.mlp\.(gate|experts|shared_experts)\.": r".\1.",
            r"\.mlp\.": ".feed_forward.",
            ".*e_score_correction_bias": "",
            r"\.input_layernorm": ".attention_norm",
            r"\.post_attention_layernorm": ".ffn_norm",
            r"\.self_attn\.(q|kv)_a_layernorm": r".attention.\1_a_norm",
            r"^model\.norm": "norm",
            "gate_proj": "w1",
            "down_proj": "w2",
            "up_proj": "w3",
        },
    ),
    Family(
        "Nemotron 3 Embed (bidirectional)",
        ("nvidia/NVIDIA-Nemotron-3-Embed-1B-NVFP4",),
        _HEADS_128 | {"model_type": "llama"},
        _HEAD | {"*": W4A4},
        architecture="LlamaBidirectionalModel",
        fields={"pooling": "avg"},
        ran="test_embedding_models.py::test_embeddings",
    ),
    Family(
        "Quark exports",
        ("amd/… (Quark)",),
        _HEADS_128 | {"model_type": "llama"},
        _UNIFORM,
        fields={"quantization_config.quant_method": "quark"},
    ),
)


def named(name: str) -> Family:
    """Family of that name.

    Raises:
        LookupError: there is none.
    """
    for family in FAMILIES:
        if family.name == name:
            return family
    raise LookupError(f"{name!r} is no family of the catalogue")
