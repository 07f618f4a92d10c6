"""Scaled-down speculative decoders, each built with a target model."""

from typing import Any

from tests.registry.entry import Draft, Entry
from tests.registry.text import bag

ONE: dict[str, Any] = {"num_nextn_predict_layers": 1}
EAGLE3 = {"draft_vocab_size": 320, "target_hidden_size": 128}
DFLASH = {
    "dflash_config": {
        "mask_token_id": 5,
        "target_layer_ids": [0, 1],
        "conv_kernel_size": 3,
        "conv_group_size": 16,
        "lilicorr_hidden_size": 64,
        "lilicorr_candidate_topk": 2,
        "lilicorr_num_heads": 4,
        "lilicorr_mlp_ratio": 2,
        "lilicorr_factor_dim": 16,
        "selector_rank": 16,
        "selector_top_k": 2,
        "final_logit_softcapping": 30.0,
    },
    "block_size": 4,
    "num_target_layers": 2,
    "draft_vocab_size": 320,
}
DSPARK = DFLASH | {"markov_rank": 16, "target_layer_ids": [0, 1], "mask_token_id": 5}
XPRESS = DFLASH | {"xpress_block_size": 4, "xpress_rank": 16, "xpress_mlp_hidden": 32}
MUSE = DSPARK | EAGLE3 | {"moe": {"is_enabled": False}, "enable_confidence_head": False}


def eagle(target: str, method: str = "eagle", **fields: Any) -> Draft:
    """Draft of Llama's shape, with ``fields`` in a config of its own."""
    return Draft(target, method, Entry("llama", fields))


DRAFTS: dict[str, Draft] = {
    "MiMoMTPModel": Draft("MiMoForCausalLM"),
    "MiMoV2MTPModel": Draft("MiMoV2ForCausalLM"),
    "MiMoV2OmniMTPModel": Draft("MiMoV2OmniForCausalLM"),
    "EagleCohereForCausalLM": Draft(
        "CohereForCausalLM",
        "eagle",
        bag(
            "cohere2",
            head_dim=32,
            layer_types=["full_attention"] * 4,
            sliding_window=64,
            logit_scale=1.0,
            attention_dropout=0.0,
            layer_norm_eps=1e-5,
        ),
    ),
    "EagleLlamaForCausalLM": eagle("LlamaForCausalLM"),
    "EagleLlama4ForCausalLM": Draft(
        "Llama4ForCausalLM",
        "eagle",
        Entry(
            "llama4_text",
            {
                "yoco_global_kv_layer": None,
                "yoco_local_kv_layer": None,
                "moe_layers": [],
                "draft_vocab_size": 320,
            },
        ),
    ),
    "EagleMiniCPMForCausalLM": Draft(
        "MiniCPMForCausalLM",
        "eagle",
        bag(
            "minicpm",
            num_experts=0,
            num_experts_per_tok=0,
            scale_emb=12,
            scale_depth=1.4,
            dim_model_base=64,
        ),
    ),
    "EagleMistralForCausalLM": Draft("MistralForCausalLM", "eagle", Entry("mistral")),
    "EagleMistralLarge3ForCausalLM": Draft("MistralLarge3ForCausalLM", "eagle"),
    "Eagle3LlamaForCausalLM": eagle("LlamaForCausalLM", "eagle3", **EAGLE3),
    "PEagleDraftModel": eagle("LlamaForCausalLM", "eagle3", **EAGLE3),
    "PeagleLlamaForCausalLM": eagle("LlamaForCausalLM", "eagle3", **EAGLE3),
    "LlamaForCausalLMEagle3": eagle("LlamaForCausalLM", "eagle3", **EAGLE3),
    "Eagle3MiniMaxM2ForCausalLM": eagle("MiniMaxM2ForCausalLM", "eagle3", **EAGLE3),
    "Eagle3Qwen2_5vlForCausalLM": eagle("Qwen2_5_VLForConditionalGeneration", "eagle3", **EAGLE3),
    "Eagle3Qwen3vlForCausalLM": eagle("Qwen3VLForConditionalGeneration", "eagle3", **EAGLE3),
    "Eagle3Qwen3ForCausalLM": Draft("Qwen3ForCausalLM", "eagle3", Entry("qwen3", EAGLE3)),
    "PeagleQwen3ForCausalLM": Draft("Qwen3ForCausalLM", "eagle3", Entry("qwen3", EAGLE3)),
    "Eagle3DeepseekV2ForCausalLM": Draft(
        "DeepseekV3ForCausalLM", "eagle3", Entry("deepseek_v2", EAGLE3)
    ),
    "Eagle3DeepseekV3ForCausalLM": Draft(
        "DeepseekV3ForCausalLM", "eagle3", Entry("deepseek_v2", EAGLE3)
    ),
    "EagleDeepSeekMTPModel": Draft("DeepseekV3ForCausalLM", "eagle", Entry("deepseek_v3", ONE)),
    "DeepSeekMTPModel": Draft("DeepseekV3ForCausalLM", changes=ONE),
    "DeepseekV32MTPModel": Draft("DeepseekV32ForCausalLM", changes=ONE),
    "DeepSeekV4MTPModel": Draft("DeepseekV4ForCausalLM", changes=ONE),
    "Dots3NoteMTPModel": Draft("Dots3NoteForCausalLM", changes=ONE),
    "BailingMoeV3MTPModel": Draft("BailingMoeV3ForCausalLM", changes=ONE),
    "BailingMoeV25MTPModel": Draft("BailingMoeV2_5ForCausalLM", changes=ONE),
    "MiniMaxM3MTP": Draft("MiniMaxM3SparseForConditionalGeneration"),
    "InklingMTPModel": Draft("InklingForConditionalGeneration", changes={"mtp_config": ONE}),
    "Gemma4MTPModel": Draft(
        "Gemma4ForCausalLM",
        "mtp",
        Entry(
            "gemma4_assistant",
            {
                "text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0},
                "backbone_hidden_size": 128,
            },
        ),
    ),
    "ErnieMTPModel": Draft("Ernie4_5_MoeForCausalLM", changes=ONE),
    "ExaoneMoeMTP": Draft("ExaoneMoeForCausalLM", changes=ONE),
    "Exaone4_5_MTP": Draft("Exaone4_5_ForConditionalGeneration", changes=ONE | {"vocab_size": 320}),
    "NemotronHMTPModel": Draft(
        "NemotronHForCausalLM",
        changes=ONE | {"mtp_hybrid_override_pattern": "*", "mtp_layers_block_type": ["attention"]},
    ),
    "LongCatFlashMTPModel": Draft("LongcatFlashForCausalLM", changes=ONE),
    "Glm4MoeMTPModel": Draft("Glm4MoeForCausalLM", changes=ONE),
    "Glm4MoeLiteMTPModel": Draft("Glm4MoeLiteForCausalLM", changes=ONE),
    "GlmOcrMTPModel": Draft("GlmOcrForConditionalGeneration", changes={"text_config": ONE}),
    "Glm5NextMTPModel": Draft("Glm5NextForConditionalGeneration", changes={"text_config": ONE}),
    "MedusaModel": Draft("LlamaForCausalLM", "medusa", Entry("medusa")),
    "OpenPanguMTPModel": Draft("PanguUltraMoEForCausalLM", changes=ONE),
    "Qwen3NextMTP": Draft("Qwen3NextForCausalLM", changes=ONE),
    "Qwen4ExpMTP": Draft("Qwen4ExpForCausalLM", changes={"mtp_num_hidden_layers": 1}),
    "Step3p5MTP": Draft(
        "Step3p5ForCausalLM",
        # The target's first layer stands for the draft's layer, whose kind the config class drops.
        changes=ONE
        | {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "attention_other_setting": None,
            "use_rope_layers": [1, 0, 1, 1],
            "swiglu_limits": [0.0] * 4,
            "swiglu_limits_shared": [0.0] * 4,
        },
    ),
    "Qwen3_5MTP": Draft("Qwen3_5ForCausalLM", changes={"mtp_num_hidden_layers": 1}),
    "Qwen3_5MoeMTP": Draft("Qwen3_5MoeForCausalLM", changes={"mtp_num_hidden_layers": 1}),
    "InternS2MobiusMTP": Draft(
        "InternS2MobiusForConditionalGeneration",
        changes={"text_config": {"mtp_num_hidden_layers": 1}},
    ),
    "HYV3MTPModel": Draft("HYV3ForCausalLM", changes=ONE),
    "HYV4MTPModel": Draft("HYV4ForCausalLM", changes=ONE),
    "KimiK3MTPModel": Draft("KimiK3ForConditionalGeneration", changes={"text_config": ONE}),
    "DFlashDraftModel": Draft(
        "Qwen3ForCausalLM",
        "dflash",
        Entry("qwen3", DFLASH),
    ),
    "DFlash2BeamDraftModel": Draft(
        "BeamForCausalLM",
        "dflash",
        Entry("qwen3", DFLASH | {"layer_types": ["sliding_attention"] * 2, "is_causal": False}),
    ),
    "DFlashQwen3XPressModel": Draft("Qwen3ForCausalLM", "dflash", Entry("qwen3", XPRESS)),
    "Qwen3XPressModel": Draft("Qwen3ForCausalLM", "dflash", Entry("qwen3", XPRESS)),
    "MuseSparkDSparkModel": Draft("Qwen3ForCausalLM", "dspark", Entry("muse_spark_dspark", MUSE)),
    "ParseAuxMTPModel": Draft("RadioMBartPrefixForCausalLM"),
    "Step5MTP": Draft("Step5ForCausalLM", changes=ONE | {"layer_types": ["full_attention"] * 3}),
    "TransformersForMTP": Draft("Qwen3ForCausalLM", changes={"num_mtp_layers": 1}),
    "TransformersMoEForMTP": Draft("Qwen3MoeForCausalLM", changes={"num_mtp_layers": 1}),
    "DFlash2DraftModel": Draft("Qwen3ForCausalLM", "dflash", Entry("qwen3", DFLASH)),
    "LiLiCorrDraftModel": Draft("Qwen3ForCausalLM", "dflash", Entry("qwen3", DFLASH)),
    "DFlashMuseGlimmerAssistantModel": Draft("Qwen3ForCausalLM", "dflash", Entry("qwen3", DFLASH)),
    "MuseGlimmerAssistantModel": Draft("Qwen3ForCausalLM", "dflash", Entry("qwen3", DFLASH)),
    "DFlashLagunaForCausalLM": Draft(
        "LagunaForCausalLM", "dflash", Entry("laguna", DFLASH | {"target_layer_count": 2})
    ),
    "Qwen3DSparkModel": Draft("Qwen3ForCausalLM", "dspark", Entry("qwen3", DSPARK)),
    "Qwen3OmniDSparkModel": Draft(
        "Qwen3OmniMoeForConditionalGeneration", "dspark", Entry("qwen3", DSPARK)
    ),
    "Gemma4DSparkModel": Draft("Gemma4ForCausalLM", "dspark", Entry("gemma4_text", DSPARK)),
    "K3DSparkModel": Draft(
        "KimiK3ForConditionalGeneration",
        "dspark",
        Entry("k3_dspark", DSPARK | {"num_target_layers": 2}),
    ),
    "DSparkDraftModel": Draft("DeepseekV4ForCausalLM", "dspark"),
    "DSparkV41DraftModel": Draft("DeepseekV41ForCausalLM", "dspark"),
    "ExtractHiddenStatesModel": Draft("Qwen3ForCausalLM", "extract_hidden_states"),
}
