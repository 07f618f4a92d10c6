"""Scaled-down multimodal models: fields that differ from their shrunk config classes."""

from typing import Any

from tests.registry.entry import Entry
from tests.registry.text import (
    CHATGLM,
    DEEPSEEK_V4,
    GLM5_NEXT,
    INKLING,
    KIMI_LINEAR,
    MIMO_V2,
    MINIMAX_M3,
    NEMOTRON_H,
    STEP5,
    bag,
)

# Sizes of towers whose config class comes with remote code.
TOWER: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "num_channels": 3,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
    "attention_dropout": 0.0,
}
INTERN_VIT = TOWER | {
    "model_type": "intern_vit_6b",
    "norm_type": "layer_norm",
    "qkv_bias": True,
    "qk_normalization": False,
    "initializer_factor": 1.0,
}
GLM4_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
INTERN: dict[str, Any] = {
    "vision_config": INTERN_VIT,
    "select_layer": -1,
    "downsample_ratio": 0.5,
    "ps_version": "v2",
    "use_thumbnail": True,
    "dynamic_image_size": True,
    "min_dynamic_patch": 1,
    "max_dynamic_patch": 2,
    "force_image_size": 28,
    "template": "internvl2_5",
    "text_config": Entry("qwen2"),
    "hidden_size": 128,
    "vocab_size": 320,
    "tie_word_embeddings": False,
}
QWEN_TOKENS = {
    "image_token_id": 300,
    "video_token_id": 301,
    "vision_start_token_id": 302,
    "vision_end_token_id": 303,
}
LFM2_TEXT = {"block_dim": 128, "layer_types": ["conv", "full_attention"], "conv_dim": 128}


DEEPSEEK_VL = {
    "text_config": ...,
    "language_config": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 320,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "kv_lora_rank": None,
        "q_lora_rank": None,
        "use_mla": False,
        "qk_rope_head_dim": 0,
        "qk_nope_head_dim": 0,
        "v_head_dim": 0,
        "topk_method": "greedy",
    },
    "vision_config": {
        "width": 64,
        "layers": 1,
        "heads": 2,
        "mlp_ratio": 2.0,
        "image_size": 28,
        "patch_size": 14,
        "model_name": "vit_tiny",
    },
    "projector_config": {"input_dim": 64, "n_embed": 128},
}


SIGLIP = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
KEYE_TOWER = TOWER | {
    "model_type": "keye_vision",
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "tokens_per_second": 2,
}
RADIO = {
    "model_type": "radio",
    "patch_size": 16,
    "max_resolution": 64,
    "image_size": 32,
    "args": {"model": "vit_base_patch16_224"},
    "architecture": "vit_base_patch16_224",
    "preferred_resolution": [32, 32],
    "version": "radio_v2.5-h",
}
PARSE: dict[str, Any] = {
    "encoder": Entry("bag", {"args": {"model": "vit_base_patch16_224"}, "patch_size": 16}),
    "decoder": Entry(
        "mbart",
        {
            "d_model": 128,
            "vocab_size": 320,
            "causal_vision_prefix": True,
            "add_cross_attention": False,
        },
    ),
    "navit_packing": True,
    "image_size": [32, 32],
}
NEMOTRON_VL: dict[str, Any] = INTERN | {
    "vision_config": Entry("siglip_vision_model", SIGLIP),
    "text_config": Entry("llama"),
    "pooling": "avg",
    "patch_size": 16,
    "vit_hidden_size": 64,
    "projector_hidden_size": 128,
    "img_context_token_id": 300,
}


MOONDREAM = {
    "text": {
        "dim": 128,
        "ff_dim": 256,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 4,
        "vocab_size": 320,
        "max_context": 256,
        "moe": {"start_layer": 1, "n_experts": 4, "n_experts_per_tok": 2, "expert_inner_dim": 64},
    },
    "vision": {
        "enc_dim": 64,
        "enc_ff_dim": 128,
        "enc_n_layers": 1,
        "enc_n_heads": 2,
        "enc_patch_size": 14,
        "crop_size": 28,
        "proj_inner_dim": 64,
        "proj_out_dim": 128,
    },
}


def wrapped(model_type: str, **fields: Any) -> Entry:
    """Entry of a composite model whose config class is remote code."""
    return Entry("bag", {"model_type": model_type, "tie_word_embeddings": False} | fields)


def ovis(text: Entry) -> Entry:
    """Entry of Ovis 2.5 or 2.6, given the entry of its language model."""
    return wrapped(
        "ovis2_5",
        text_config=text,
        visual_vocab_size=16,
        hidden_size=128,
        vit_config=Entry(
            "bag",
            TOWER
            | {
                "model_type": "siglip2_navit",
                "num_patches": -1,
                "hidden_stride": 2,
                "temporal_patch_size": 1,
                "window_size": 28,
                "fullatt_block_indexes": "0",
                "preserve_original_pe": True,
                "use_rope": True,
            },
        ),
        vocab_size=320,
        conversation_formatter_class="Qwen",
    )


ENTRIES: dict[str, Entry] = {
    "InklingForConditionalGeneration": Entry("inkling_mm_model", {"text_config": INKLING}),
    "CohereCompassForConditionalGeneration": Entry(
        changes={"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": True}}
    ),
    "Gemma4ForConditionalGeneration": Entry(
        "gemma4",
        {
            "vision_config": {
                "hidden_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 32,
                "intermediate_size": 128,
            },
            "audio_config": None,
        },
    ),
    "Gemma4UnifiedForConditionalGeneration": Entry(changes={"vision_config": {}}),
    "Glm4vMoeForConditionalGeneration": Entry(
        changes={"text_config": {"head_dim": 32, "use_qk_norm": False}}
    ),
    "Ernie4_5_VLMoeForConditionalGeneration": Entry(
        changes={
            "pixel_hidden_size": 64,
            "spatial_conv_size": 2,
            "temporal_conv_size": 2,
            "hidden_size": 128,
            "use_temporal_conv": True,
            "vocab_size": 320,
            "im_patch_id": 300,
            "vision_config": {"embed_dim": 64, "mlp_ratio": 2},
        }
    ),
    "Granite4VisionForConditionalGeneration": Entry(
        changes={
            "text_config": Entry("granite"),
            "deepstack_layer_map": [[-1, 0]],
            "downsample_rate": "1/2",
            "spatial_target_layers": [0],
        }
    ),
    "Qwen3OmniMoeForConditionalGeneration": Entry(
        changes={
            "thinker_config": {
                "vision_config": {"image_size": 28, "apply_vit_abs_pos_embed": False},
                "text_config": {"tie_word_embeddings": False},
            }
        }
    ),
    "Step3p7ForConditionalGeneration": Entry(
        changes={"vision_config": {"output_dim": 64, "heads": 2, "width": 64, "layers": 1}}
    ),
    "DeepseekOCRForCausalLM": Entry("deepseek_vl_v2", DEEPSEEK_VL),
    "DeepseekOCR2ForCausalLM": Entry("deepseek_vl_v2", DEEPSEEK_VL),
    "Glm5NextForConditionalGeneration": Entry(changes={"text_config": GLM5_NEXT}),
    "GraniteSpeechForConditionalGeneration": Entry(ignore=("*out_mid",)),
    "GraniteSpeechPlusForConditionalGeneration": Entry(ignore=("*out_mid",)),
    "Lfm2VlForConditionalGeneration": Entry(changes={"text_config": LFM2_TEXT}),
    "MiniMaxM3SparseForConditionalGeneration": Entry(
        "minimax_m3_vl",
        {
            "text_config": MINIMAX_M3,
            "vision_config": TOWER
            | {"img_token_compression_config": {"spatial_merge_size": 2, "temporal_patch_size": 2}},
        },
    ),
    "Qwen3VLMoeForConditionalGeneration": Entry(changes={"text_config": {"norm_topk_prob": True}}),
    "Qwen4ExpForConditionalGeneration": Entry(
        changes={
            "text_config": {"output_gate_type": "silu"},
            "vision_config": {"deepstack_visual_indexes": []},
        }
    ),
    "VoxtralForConditionalGeneration": Entry(
        changes={"audio_config": {"downsample_factor": 4, "window_size": 8}}
    ),
    "InternVLChatModel": wrapped("internvl_chat", **INTERN),
    "H2OVLChatModel": wrapped(
        "h2ovl_chat", **INTERN | {"use_msac": True, "text_config": Entry("mistral")}
    ),
    "NVLM_D": wrapped("NVLM_D", **INTERN),
    "SkyworkR1VChatModel": wrapped("skywork_chat", **INTERN),
    "Qwen2_5OmniModel": Entry("qwen2_5_omni"),
    "InternS1ForConditionalGeneration": Entry("internvl"),
    "InternS1ProForConditionalGeneration": wrapped(
        "interns1_pro",
        text_config=Entry("qwen3_moe"),
        **QWEN_TOKENS,
        vision_config=Entry("qwen3_vl_vision", {"out_hidden_size": 128}),
    ),
    "InternVLForConditionalGeneration": Entry("internvl"),
    "DeepseekVLV2ForCausalLM": Entry("deepseek_vl_v2", DEEPSEEK_VL),
    "UnlimitedOCRForCausalLM": Entry("unlimited_ocr", DEEPSEEK_VL),
    "IsaacForConditionalGeneration": Entry("isaac"),
    "KimiVLForConditionalGeneration": Entry(
        "kimi_vl",
        {
            "text_config": {
                "n_routed_experts": 4,
                "n_shared_experts": 1,
                "num_experts_per_tok": 2,
                "n_group": 1,
                "topk_group": 1,
                "num_key_value_heads": 4,
            }
        },
    ),
    "KimiK25ForConditionalGeneration": Entry("kimi_k25"),
    "KimiK3ForConditionalGeneration": Entry("kimi_k3", {"text_config": KIMI_LINEAR}),
    "BagelForConditionalGeneration": Entry("bagel"),
    "BailingMoeV3VLForConditionalGeneration": Entry(
        "bailing_moe_v3_vl", {"text_config": {"layer_group_size": 2, "no_kda_lora": True}}
    ),
    "Cosmos3EdgeForConditionalGeneration": Entry(
        "cosmos3_edge",
        {
            "text_config": {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "mrope_section": [6, 5, 5],
                }
            }
        },
    ),
    "Alpamayo2Super": Entry("alpamayo2_super"),
    "Cosmos3ForConditionalGeneration": Entry("qwen3_vl"),
    # Fields with defaults in vLLM 0.32 but not in transformers' class, which vLLM 0.33 uses.
    "QianfanOCRForConditionalGeneration": Entry(
        changes={"force_image_size": 28, "select_layer": -1, "ps_version": "v2"}
    ),
    "MiniCPMOcrForConditionalGeneration": Entry("minicpmv4_6"),
    "RadioMBartPrefixForCausalLM": bag("nemotron_parse", PARSE),
    "Step5ForConditionalGeneration": Entry(
        "step5_vl",
        {
            "text_config": STEP5 | {"architectures": ["Step5ForCausalLM"]},
            "vision_config": {"mlp_ratio": 2, "layers": 1, "image_size": 28},
        },
    ),
    "FunAudioChatForConditionalGeneration": Entry(
        "funaudiochat",
        {
            "audio_config": {
                "pad_token_id": 0,
                "group_size": 5,
                "bos_token_id": 1,
                "eos_token_id": 2,
                "output_dim": 128,
            }
        },
    ),
    "MiDashengLMModel": Entry("midashenglm"),
    "Moondream3ForCausalLM": Entry(
        "moondream3", {"text_config": ..., "vision_config": ..., "config": MOONDREAM}
    ),
    "HfMoondream": Entry(
        "moondream3", {"text_config": ..., "vision_config": ..., "config": MOONDREAM}
    ),
    "MossTranscribeDiarizeForConditionalGeneration": Entry("moss_transcribe_diarize"),
    "OpenVLAForActionPrediction": Entry("openvla"),
    "Ovis": Entry(
        "ovis",
        {
            "llm_config": Entry("qwen2"),
            "hidden_size": 128,
            "visual_tokenizer_config": {
                "model_type": "siglip_visual_tokenizer",
                "vocab_size": 16,
                "hidden_stride": 2,
                "backbone_config": {"model_type": "siglip_vision_model"} | SIGLIP,
            },
        },
    ),
    "Step3VLForConditionalGeneration": Entry(
        "step3_vl",
        {
            "text_config": {
                "architectures": ["Step3TextForCausalLM"],
                "moe_layers_enum": "1",
                "share_q_dim": 64,
                "share_expert_dim": 64,
                "head_dim": 32,
            }
        },
    ),
    "UltravoxModel": Entry(
        "ultravox",
        {
            "vocab_size": 320,
            "text_config": Entry("llama"),
            "audio_config": Entry("whisper"),
            "wrapped_model_config": ...,
            "hidden_size": 128,
        },
    ),
    "Qwen3ASRRealtimeGeneration": Entry("qwen3_asr"),
    "Dots3NoteForCausalLM": Entry("dots3_note"),
    "DeepseekV41ForCausalLM": Entry(
        "deepseek_v41", {"text_config": DEEPSEEK_V4 | {"compress_ratios": [0, 2]}}
    ),
    "VoxtralRealtimeGeneration": Entry(
        "voxtral_realtime", {"audio_config": {"downsample_factor": 4, "window_size": 8}}
    ),
    "InternS2PreviewForConditionalGeneration": Entry(
        "qwen3_5_moe", {"model_type": "intern_s2_preview"}
    ),
    "LightOnOCRForConditionalGeneration": Entry(
        "lighton_ocr",
        {
            "vision_feature_layer": -1,
            "projector_hidden_act": "gelu",
            "multimodal_projector_bias": True,
        },
    ),
    "MoonshotKimiaForCausalLM": Entry("qwen2", {"model_type": "kimi_audio"}),
    "HunYuanVLForConditionalGeneration": Entry(changes={"text_config": {"head_dim": 32}}),
    "BeeForConditionalGeneration": wrapped(
        "bee",
        text_config=Entry("qwen3"),
        vision_config=Entry("siglip_vision_model", SIGLIP),
        image_token_index=300,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        projector_hidden_act="gelu",
        image_grid_pinpoints=[[28, 28]],
        multimodal_projector_bias=True,
    ),
    "RForConditionalGeneration": wrapped(
        "r_vl",
        text_config=Entry("qwen3"),
        vision_config=Entry("siglip_vision_model", SIGLIP),
        image_token_index=300,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        projector_hidden_act="gelu",
        image_grid_pinpoints=[[28, 28]],
        multimodal_projector_bias=True,
    ),
    "Eagle2_5_VLForConditionalGeneration": wrapped(
        "eagle_2_5_vl",
        **INTERN | {"vision_config": Entry("siglip_vision_model", SIGLIP)},
    ),
    "Llama_Nemotron_Nano_VL": wrapped("Llama_Nemotron_Nano_VL", **NEMOTRON_VL),
    "LlamaNemotronVLModel": wrapped("llama_nemotron_vl", **NEMOTRON_VL),
    "LlamaNemotronVLForSequenceClassification": Entry(
        "bag", {"model_type": "llama_nemotron_vl_rerank"} | NEMOTRON_VL
    ),
    "GLM4VForCausalLM": Entry(
        "chatglm",
        CHATGLM
        | {
            "vision_config": TOWER
            | {
                "num_heads": 2,
                "num_positions": 5,
                "in_channels": 3,
                "dropout_prob": 0.0,
                "scaling_factor": 8,
                "image_size": 28,
            },
            "boi_token_id": 300,
            "eoi_token_id": 301,
            "pad_token_id": 0,
        },
    ),
    "MolmoForCausalLM": bag(
        "molmo",
        embedding_size=320,
        layer_norm_type="rms",
        attention_layer_norm=False,
        qkv_bias=True,
        weight_tying=False,
        norm_after=False,
        layer_norm_eps=1e-5,
        vision_backbone={},
        additional_vocab_size=64,
    ),
    "Phi3VForCausalLM": Entry(
        "phi3",
        {
            "model_type": "phi3_v",
            "img_processor": {
                "name": "clip_vision_model",
                "image_dim_out": 1024,
                "layer_idx": -2,
                "num_img_tokens": 144,
                "model_name": "openai/clip-vit-large-patch14-336",
            },
            "embd_layer": {
                "embedding_cls": "image",
                "hd_transform_order": "sub_glb",
                "projection_cls": "mlp",
                "use_hd_transform": True,
                "with_learnable_separator": True,
                "image_embd_layer": {},
            },
        },
    ),
    "OpenCUAForConditionalGeneration": wrapped(
        "opencua",
        text_config=Entry("qwen2"),
        vision_config=Entry("qwen2_5_vl_vision", {"out_hidden_size": 128, "spatial_merge_size": 2}),
        media_placeholder_token_id=300,
        hidden_size=128,
        vocab_size=320,
    ),
    "Ovis2_6ForCausalLM": ovis(Entry("qwen3")),
    "Ovis2_6_MoeForCausalLM": ovis(Entry("qwen3_moe")),
    "Ovis2_5": ovis(Entry("qwen3")),
    "PixtralForConditionalGeneration": wrapped(
        "pixtral",
        text_config=Entry("mistral"),
        vision_config=TOWER
        | {
            "model_type": "pixtral",
            "image_token_id": 300,
            "image_break_token_id": 301,
            "image_end_token_id": 302,
            "rope_theta": 1e4,
            "max_image_size": 28,
            "head_dim": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "adapter_bias": False,
            "spatial_merge_size": 2,
            "mm_projector_id": "patch_merge",
            "add_pre_mm_projector_layer_norm": True,
        },
    ),
    "StepVLForConditionalGeneration": wrapped(
        "step_vl",
        text_config=Entry("qwen3"),
        projector_bias=False,
        understand_projector_stride=2,
        vision_config={
            "width": 64,
            "layers": 1,
            "heads": 2,
            "image_size": 28,
            "patch_size": 14,
            "output_dim": 64,
            "mlp_ratio": 2.0,
            "ls_init_value": 0.1,
            "use_abs_posemb": True,
            "use_cls_token": False,
            "use_ln_post": False,
            "use_ln_pre": True,
            "use_rope2d": True,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "hidden_size": 64,
        },
    ),
    "KananaVForConditionalGeneration": wrapped(
        "kanana-1.5-v",
        text_config=Entry("llama", {"eos_token_id": 1}),
        vision_config=Entry("qwen2_vl_vision", {"hidden_size": 64, "embed_dim": 64}),
        projector_config={
            "encoder_hidden_size": 64,
            "output_hidden_size": 128,
            "hidden_size": 64,
            "depth": 1,
            "kv_channels": 32,
            "mlp_depth": 1,
            "merge_size": 2,
            "pos_emb": True,
            "pos_emb_size": 16,
            "projector_type": "dynamic-c-abs",
            "feature_layer_index": -1,
            "num_eos_tokens": 0,
            "num_query_tokens": -1,
            "prenorm": False,
        },
    ),
    "HCXVisionV2ForCausalLM": wrapped(
        "vlm",
        text_config=Entry("hyperclovax"),
        image_token_id=300,
        video_token_id=301,
        vision_config=Entry("qwen2_5_vl_vision", {"out_hidden_size": 128}),
    ),
    "NemotronH_Nano_VL_V2": wrapped(
        "NemotronH_Nano_VL_V2",
        **NEMOTRON_VL
        | {
            "text_config": Entry("nemotron_h", NEMOTRON_H | {"dtype": "bfloat16"}),
            "vision_config": RADIO,
            "vit_hidden_size": 768,
            "video_pruning_rate": 0.0,
            "image_tag_type": "internvl",
            "norm_mean": [0.5] * 3,
            "norm_std": [0.5] * 3,
        },
    ),
    "KeyeForConditionalGeneration": bag(
        "Keye", head_dim=32, vision_config=KEYE_TOWER, **QWEN_TOKENS
    ),
    "KeyeVL1_5ForConditionalGeneration": bag(
        "KeyeVL1_5", head_dim=32, vision_config=KEYE_TOWER, **QWEN_TOKENS
    ),
    "MiMoV2OmniForCausalLM": bag(
        "mimo_v2_omni",
        MIMO_V2,
        vision_config=TOWER
        | {
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "tokens_per_second": 2,
            "depth": 1,
            "kv_channels": 32,
            "num_heads": 2,
            "num_key_value_heads": 2,
            "fullatt_block_indexes": [0],
            "in_chans": 3,
            "in_channels": 3,
            "out_hidden_size": 128,
            "qk_channels": 32,
            "visual_token_window_size": 28,
            "vit_window_attn_types": [-1],
            "use_sink": False,
            "window_size": 28,
        },
        **QWEN_TOKENS,
    ),
    "DotsOCRForCausalLM": Entry(
        "qwen2",
        {
            "model_type": "dots_ocr",
            "image_token_id": 300,
            "video_token_id": 301,
            "vision_config": TOWER
            | {
                "model_type": "dots_vit",
                "embed_dim": 64,
                "post_norm": True,
                "rms_norm_eps": 1e-5,
                "spatial_merge_size": 2,
                "temporal_patch_size": 1,
                "use_bias": False,
                "hidden_size": 128,
                "is_causal": False,
                "init_merger_std": 0.02,
            },
        },
    ),
}
