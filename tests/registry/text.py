"""Scaled-down text models: fields that differ from their shrunk config classes."""

from types import SimpleNamespace
from typing import Any

from tests.registry.entry import Entry

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# Sizes of models whose config class comes with remote code.
BAG: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "rope_parameters": ROPE,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 64,
    "num_shared_experts": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
}
MLA = {
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
SLIDING_AND_FULL = ["sliding_attention", "full_attention"]


def bag(
    model_type: str,
    *parts: dict[str, Any],
    ignore: tuple[str, ...] = (),
    class_name: str = "PreTrainedConfig",
    **fields: Any,
) -> Entry:
    """Entry of a model without a config class; ``parts`` and ``fields`` are added to ``BAG``."""
    merged = BAG | {"model_type": model_type}
    for part in parts:
        merged |= part
    return Entry("bag", merged | fields, ignore, class_name)


BAILING = {"head_dim": 32, "use_bias": False, "use_qkv_bias": False, "embedding_dropout": 0.0}
BAILING_LINEAR = (
    EXPERTS
    | MLA
    | BAILING
    | {
        "layer_group_size": 2,
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "short_conv_kernel_size": 4,
        "no_kda_lora": True,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    }
)
CHATGLM = {"num_layers": 2, "original_rope": True, "tie_word_embeddings": False}
BLOCKS = [
    SimpleNamespace(
        attention=SimpleNamespace(n_heads_in_group=2, no_op=False, replace_with_linear=False),
        ffn=SimpleNamespace(ffn_mult=2.0, no_op=False, replace_with_linear=False),
    )
] * 2
MIMO_V2 = EXPERTS | {
    "head_dim": 32,
    "v_head_dim": 32,
    "swa_head_dim": 32,
    "swa_v_head_dim": 32,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_rope_theta": 10000.0,
    "sliding_window_size": 64,
    "hybrid_layer_pattern": [1, 0],
    "moe_layer_freq": [0, 1],
    "layernorm_epsilon": 1e-6,
}
STEP3P5 = EXPERTS | {
    "head_dim": 32,
    "num_attention_groups": 2,
    "layer_types": ["full_attention", "sliding_attention"],
    "use_rope_layers": [1, 0],
    "attention_other_setting": {
        "attention_type": "sliding_attention",
        "num_attention_heads": 4,
        "num_attention_groups": 2,
        "head_dim": 32,
        "true_head_dim": 32,
    },
    "att_impl_type": "GQA",
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "moe_layers_enum": "1",
    "moe_router_activation": "sigmoid",
    "moe_router_scaling_factor": 1.0,
    "use_moe_router_bias": True,
    "norm_expert_weight": True,
    "need_fp32_gate": True,
    "share_expert_dim": 64,
    "sparse_config": {},
    "share_expert_dims": 64,
    "sliding_window": 64,
    "swiglu_limits": [0.0, 0.0],
    "swiglu_limits_shared": [0.0, 0.0],
}

INKLING = {
    "padded_vocab_size": 320,
    "unpadded_vocab_size": 320,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "shared_expert_sink": True,
    "local_layer_ids": [0],
    "dense_mlp_idx": 1,
}
GLM5_NEXT = {
    "num_key_value_heads": 4,
    "qk_rope_head_dim": 0,
    "mhc": False,
    "mla_use_nope": True,
    "indexer_rope_interleave": True,
}
KIMI_LINEAR = MLA | {
    "mla_use_nope": True,
    "num_key_value_heads": 4,
    "linear_attn_config": {
        "kda_layers": [1],
        "full_attn_layers": [2],
        "num_heads": 4,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
    },
    "num_experts": 4,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "use_grouped_topk": True,
}
NEMOTRON_H = {
    "layers_block_type": ["mamba", "mlp", "attention", "mlp"],
    "num_hidden_layers": 4,
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "n_groups": 2,
    "mamba_n_groups": 2,
}
MINIMAX_M3 = {
    "dense_intermediate_size": 256,
    "moe_layer_freq": [0, 1],
    "sparse_attention_config": {
        "sparse_attention_freq": [0, 1],
        "sparse_num_index_heads": 2,
        "sparse_index_dim": 32,
        "sparse_topk_blocks": 2,
        "sparse_block_size": 16,
        "sparse_init_block": 0,
        "sparse_local_block": 1,
        "sparse_score_type": "max",
        "sparse_disable_index_value": [0, 1],
        "use_sparse_attention": True,
    },
}
DEEPSEEK_V4 = (
    EXPERTS
    | BAG
    | {
        "num_key_value_heads": 1,
        "head_dim": 512,
        "q_lora_rank": 64,
        "qk_rope_head_dim": 64,
        "o_groups": 2,
        "o_lora_rank": 64,
        "index_n_heads": 4,
        "index_head_dim": 128,
        "index_topk": 64,
        "sliding_window": 64,
        "num_nextn_predict_layers": 0,
        "compress_ratios": [4, 128],
        "compress_rope_theta": 10000.0,
        "hc_mult": 4,
        "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 20,
        "num_hash_layers": 0,
        "swiglu_limit": 10.0,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
    }
)

LINEAR_AND_FULL = ["linear_attention", "full_attention"]
ALICE_AI: dict[str, Any] = EXPERTS | {
    "head_dim": 32,
    "layer_types": LINEAR_AND_FULL,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "shared_expert_intermediate_size": 64,
    "block_attn_res_block_size": 2,
    "kda_allow_negative_eigenvalues": False,
    "router_score_function": "sigmoid",
    "router_bias_correction": True,
}
BEAM = {
    "head_dim": 32,
    "layer_types": SLIDING_AND_FULL,
    "mlp_layer_types": ["dense", "sparse"],
    "num_hidden_layers": 2,
    "n_group": 1,
    "topk_group": 1,
}
DORY = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp"],
    "n_input_layers": 0,
    "n_recurrent_layers": 2,
    "n_output_layers": 2,
    "n_recurrent_loops": 2,
    "rope_parameters": dict.fromkeys(SLIDING_AND_FULL, ROPE),
}
# vLLM's own config class, in 0.32, has the one field; transformers' class has the other.
MUSE_GLIMMER = {"vision_config": {"output_dim": 256}, "out_hidden_size": 256}
STEP5: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_attention_groups": 2,
    "head_dim": 32,
    "layer_types": SLIDING_AND_FULL,
    "sliding_window": 64,
    "use_moe": True,
    "moe_layers_enum": "1",
    "moe_intermediate_size": 64,
    "share_expert_dim": 64,
    "sparse_config": {},
    "max_seq_len": 256,
}

ENTRIES: dict[str, Entry] = {
    "AliceAIForCausalLM": bag("alice_ai", ALICE_AI),
    "BeamForCausalLM": Entry("beam", BEAM),
    "DomynEdgeForCausalLM": bag(
        "domyn_edge",
        head_dim=32,
        position_layers=["rope", "nope"],
        window_sizes=[[64, 0], [0, 0]],
        per_layer_config={0: {"head_dim": 64}},
    ),
    "DoryForCausalLM": Entry("dory", DORY),
    "FlintForCausalLM": Entry("flint", {"num_hidden_layers": 2, "layer_types": SLIDING_AND_FULL}),
    "Kolibri1ForCausalLM": Entry("qwen3_moe"),
    "Step5ForCausalLM": Entry("step5", STEP5),
    "DeepseekV4ForCausalLM": Entry("deepseek_v4", DEEPSEEK_V4),
    "DeepseekV4ForConditionalGeneration": Entry(
        "deepseek_v4", DEEPSEEK_V4 | {"vision_n_layers": 1}
    ),
    "DeepseekV3ForCausalLM": Entry(changes={"topk_method": "noaux_tc"}),
    "FalconForCausalLM": Entry(changes={"ffn_hidden_size": 512}),
    "DeepseekV32ForCausalLM": Entry(
        "deepseek_v32", {"index_topk": 64, "index_n_heads": 4, "index_head_dim": 128}
    ),
    "AfmoeForCausalLM": Entry(
        changes={"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1}
    ),
    "BailingMoeForCausalLM": bag("bailing_moe", EXPERTS, BAILING),
    "BailingMoeV2ForCausalLM": bag("bailing_moe_v2", EXPERTS, BAILING, use_qk_norm=True),
    "BailingMoeV2_5ForCausalLM": bag("bailing_hybrid", BAILING_LINEAR),
    "BailingMoeV3ForCausalLM": bag("bailing_hybrid", BAILING_LINEAR),
    "ChatGLMModel": Entry("chatglm", CHATGLM),
    "ChatGLMForConditionalGeneration": Entry("chatglm", CHATGLM),
    "DbrxForCausalLM": Entry(
        changes={
            "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
            "ffn_config": {"ffn_hidden_size": 128, "moe_num_experts": 4, "moe_top_k": 2},
        }
    ),
    "DeciLMForCausalLM": bag("nemotron-nas", block_configs=BLOCKS, num_key_value_heads=None),
    "DeepseekForCausalLM": Entry("deepseek_v3", {"model_type": "deepseek"}),
    "DeepseekV2ForCausalLM": Entry(
        "deepseek_v2",
        {
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "ExaoneForCausalLM": bag(
        "exaone", layer_norm_epsilon=1e-6, activation_function="silu", num_layers=2
    ),
    "ExaoneMoEForCausalLM": Entry("exaone_moe"),
    "Glm5NextForCausalLM": Entry("glm5_next_text", GLM5_NEXT),
    "Rnj1ForCausalLM": bag(
        "rnj1",
        head_dim=32,
        final_logit_softcapping=30.0,
        hidden_activation="gelu_pytorch_tanh",
        layer_types=SLIDING_AND_FULL,
        query_pre_attn_scalar=32,
        sliding_window=64,
        rope_parameters={"full_attention": ROPE, "sliding_attention": ROPE},
    ),
    "Glm4MoeForCausalLM": Entry(changes={"head_dim": 32}),
    "Glm4MoeLiteForCausalLM": Entry(changes={"first_k_dense_replace": 1}),
    "Gemma3nForCausalLM": Entry(
        "gemma3n_text",
        {
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": SLIDING_AND_FULL * 2,
            "hidden_size_per_layer_input": 32,
            "laurel_rank": 16,
            "activation_sparsity_pattern": [0.0] * 4,
            "intermediate_size": 256,
        },
        ignore=("*altup*",),
    ),
    "Qwen4ExpForCausalLM": Entry(
        "qwen4_exp_text",
        {"output_gate_type": "silu"},
    ),
    "GPTJForCausalLM": Entry(changes={"rotary_dim": 16}),
    "HYV3ForCausalLM": Entry(
        changes={
            "first_k_dense_replace": 1,
            "expert_hidden_dim": 64,
            "qk_norm": True,
            "route_norm": True,
        }
    ),
    "InternLM2ForCausalLM": bag("internlm2", bias=False),
    "InternLM3ForCausalLM": bag("internlm3", head_dim=32, bias=False, qkv_bias=False),
    "InklingForCausalLM": Entry("inkling_model", INKLING),
    "MiniMaxM3SparseForCausalLM": Entry("minimax_m3_vl", {"text_config": MINIMAX_M3}),
    "MistralLarge3ForCausalLM": Entry("deepseek_v3", {"model_type": "deepseek_v3"}),
    "IQuestCoderForCausalLM": bag("iquestcoder"),
    "IQuestLoopCoderForCausalLM": bag(
        "iquestloopcoder", loop_num=2, loop_window_size=64, max_window_layers=2
    ),
    "K2HorizonForCausalLM": bag(
        "k2_horizon",
        EXPERTS,
        head_dim=32,
        decoder_sparse_step=1,
        mlp_only_layers=[0],
        attention_gate_func="sigmoid",
        layernorm_num_groups=1,
        moe_gate_bias=False,
        mova_num_experts=0,
        mova_num_experts_per_tok=0,
        query_key_norm=True,
        rope_head_dim=32,
        router_scaling_factor=1.0,
        router_score_func="sigmoid",
    ),
    "KimiLinearForCausalLM": Entry("kimi_linear", KIMI_LINEAR),
    "LLaMAForCausalLM": Entry("llama"),
    "Lfm2ForCausalLM": Entry(
        changes={"block_dim": 128, "layer_types": ["conv", "full_attention"], "conv_dim": 128}
    ),
    "Lfm2MoeForCausalLM": Entry(
        changes={"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}
    ),
    "Llama4ForCausalLM": Entry("llama4_text"),
    "LongcatFlashForCausalLM": Entry(
        changes={
            "mla_scale_q_lora": True,
            "mla_scale_kv_lora": True,
            "num_layers": 2,
            "zero_expert_type": "identity",
        }
    ),
    "LongcatFlashNgramForCausalLM": Entry(
        "longcat_flash",
        {
            "mla_scale_q_lora": True,
            "mla_scale_kv_lora": True,
            "num_layers": 2,
            "zero_expert_type": "identity",
            "emb_neighbor_num": 2,
            "emb_split_num": 2,
            "ngram_vocab_size_ratio": 2,
        },
    ),
    "MiniCPMForCausalLM": bag(
        "minicpm",
        num_experts=0,
        num_experts_per_tok=0,
        scale_emb=12,
        scale_depth=1.4,
        dim_model_base=64,
    ),
    "Mamba2ForCausalLM": Entry(changes={"num_heads": 8, "head_dim": 32, "n_groups": 1}),
    "MiniMaxM2ForCausalLM": Entry(
        changes={"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True}
    ),
    "MiMoForCausalLM": Entry("qwen2", {"model_type": "mimo", "num_nextn_predict_layers": 1}),
    "MiMoV2FlashForCausalLM": Entry("mimo_v2_flash", MIMO_V2),
    "MiMoV2ForCausalLM": bag("mimo_v2", MIMO_V2),
    "NemotronHForCausalLM": Entry("nemotron_h", NEMOTRON_H),
    "NemotronHPuzzleForCausalLM": Entry("nemotron_h", NEMOTRON_H),
    "NemotronForCausalLM": Entry(changes={"num_key_value_heads": 2}),
    "MuseGlimmerForCausalLM": Entry("muse_glimmer", MUSE_GLIMMER),
    "MuseGlimmerForConditionalGeneration": Entry("muse_glimmer", MUSE_GLIMMER),
    "OrionForCausalLM": bag("orion"),
    "PanguEmbeddedForCausalLM": bag("PanguEmbedded", bias=True),
    "PanguProMoEV2ForCausalLM": bag("pangu_pro_moe_v2", EXPERTS),
    "PanguUltraMoEForCausalLM": bag("pangu_ultra_moe", EXPERTS, MLA, num_key_value_heads=4),
    "Param2MoEForCausalLM": bag(
        "param2moe",
        EXPERTS,
        head_dim=32,
        score_function="sigmoid",
        rope_scaling=None,
        use_qk_norm=True,
    ),
    "PhiMoEForCausalLM": Entry("phimoe"),
    "Plamo3ForCausalLM": bag(
        "plamo3",
        head_dim=32,
        interleaved_sliding_window=[64, None],
        layer_types=SLIDING_AND_FULL,
        rope_local_theta=10000,
        sliding_window=64,
        rope_parameters={"full_attention": ROPE, "sliding_attention": ROPE},
    ),
    "SarvamMoEForCausalLM": bag(
        "sarvam_moe",
        EXPERTS,
        BAILING,
        use_qk_norm=True,
        score_function="sigmoid",
        moe_router_enable_expert_bias=True,
    ),
    "SarvamMLAForCausalLM": bag(
        "sarvam_mla",
        EXPERTS,
        MLA,
        num_key_value_heads=4,
        moe_layer_freq=1,
        score_function="sigmoid",
    ),
    "Step1ForCausalLM": bag("step1", num_attention_groups=2),
    "Step3TextForCausalLM": Entry(
        "step3_text",
        {
            "moe_layers_enum": "1",
            "share_q_dim": 64,
            "share_expert_dim": 64,
            "sparse_config": {},
            "norm_expert_weight": False,
            "head_dim": 32,
        },
    ),
    "Step3p5ForCausalLM": Entry("step3p5", BAG | STEP3P5),
    "SolarForCausalLM": bag(
        "solar", bskcn_1=[0], bskcn_2=[0], bskcn_3=[1], bskcn_4=[1], bskcn_tv=[0.9, 0.8]
    ),
    "TeleChat2ForCausalLM": bag(
        "telechat",
        n_head=4,
        n_layer=2,
        mlp_bias=False,
        ffn_hidden_size=256,
        layer_norm_epsilon=1e-6,
        bias=False,
    ),
    "TeleChat3ForCausalLM": bag("telechat3", mlp_bias=False),
    "TeleFLMForCausalLM": bag(
        "teleflm", use_mup=True, mup_scale_factor=2.0, output_mult=1.0, input_mult=1.0
    ),
    "Zamba2ForCausalLM": Entry(
        changes={
            "layers_block_type": ["mamba", "hybrid"],
            "num_hidden_layers": 2,
            "num_key_value_heads": 4,
            "n_mamba_heads": 8,
            "num_mem_blocks": 1,
            "attention_head_dim": 64,
            "hybrid_layer_ids": [1],
        }
    ),
}
