"""Scaled-down embedding, reward and classification models."""

from typing import Any

from tests.registry.entry import Entry
from tests.registry.text import ROPE, bag

GTE: dict[str, Any] = {
    "layer_norm_eps": 1e-12,
    "type_vocab_size": 2,
    "position_embedding_type": "rope",
    "hidden_act": "gelu",
    "layer_norm_type": "layer_norm",
    "rope_theta": 10000.0,
    "rope_parameters": ROPE,
    "num_labels": 1,
}
NOMIC = {
    "activation_function": "swiglu",
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "rotary_emb_base": 10000.0,
    "rotary_emb_scale_base": None,
    "rotary_emb_interleaved": False,
    "n_inner": 256,
    "n_positions": 256,
    "max_trained_positions": 256,
    "layer_norm_epsilon": 1e-12,
    "prenorm": False,
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 128,
    "type_vocab_size": 2,
    "rotary_emb_fraction": 1.0,
    "moe_every_n_layers": 0,
}
LFM2 = {"block_dim": 128, "layer_types": ["conv", "full_attention"], "conv_dim": 128}
JOINT_HEAD = {
    "hidden_size": 128,
    "width": 64,
    "routing_layers": 1,
    "layers": 1,
    "heads": 2,
    "feedforward": 128,
}
DECISION = {"format_version": 1, "codes": ["A", "B"], "token_ids": [5, 6]}
LABELS = {"num_labels": 2}

ENTRIES: dict[str, Entry] = {
    "BertSpladeSparseEmbeddingModel": Entry("bert"),
    "BgeM3EmbeddingModel": Entry("xlm-roberta"),
    "DeepseekV3BidirectionalModel": Entry("deepseek_v3"),
    "XLMRobertaModel": Entry(changes={"position_embedding_type": "absolute"}),
    "GteModel": bag("gte", GTE, class_name="GteConfig"),
    "GteNewModel": bag("new", GTE, class_name="NewConfig"),
    "GteNewForSequenceClassification": bag("new", GTE, class_name="NewConfig"),
    "NomicBertModel": bag("nomic_bert", NOMIC, class_name="NomicBertConfig"),
    "JinaEmbeddingsV5Model": Entry("qwen3"),
    "LlamaBidirectionalModel": Entry("llama", {"pooling": "avg"}),
    "LlamaBidirectionalForSequenceClassification": Entry("llama", {"pooling": "avg"}),
    "VoyageQwen3BidirectionalEmbedModel": Entry("qwen3", LABELS),
    "HF_ColBERT": Entry("bert"),
    "ColBERTModernBertModel": Entry("modernbert", {"dim": 32}),
    "ColBERTJinaRobertaModel": bag(
        "xlm-roberta",
        GTE,
        dim=32,
        position_embedding_type="rotary",
        class_name="XLMRobertaFlashConfig",
        pad_token_id=1,
    ),
    "ColBERTLfm2Model": Entry("lfm2", LFM2 | {"dim": 32}),
    "Lfm2BidirectionalModel": Entry("lfm2", LFM2),
    "JinaForRanking": Entry("qwen3", {"embedding_size": 32}),
    "ClefFlashForJointSchema": Entry("qwen3_5", {"joint_head_config": JOINT_HEAD}),
    "ColModernVBertForRetrieval": Entry("modernvbert"),
    "ColUltraVBertForRetrieval": Entry("ultravbert"),
    "D3ForSequenceClassification": Entry("qwen3_5", {"decision_config": DECISION}),
    "ModernVBertModel": Entry("modernvbert"),
    "ColQwen3": Entry("colqwen3", {"embed_dim": 32}),
    "OpsColQwen3Model": Entry("ops_colqwen3", {"embed_dim": 32}),
    "Qwen3VLNemotronEmbedModel": Entry("qwen3_vl_nemotron_embed", {"embed_dim": 32}),
    "ColQwen3_5": Entry("qwen3_5", {"embed_dim": 32, "retrieval_attention_contract": "causal"}),
    "InternLM2ForRewardModel": bag("internlm2", bias=False),
    "Qwen2ForRewardModel": Entry("qwen2", {"num_labels": 1}),
    "Qwen2ForProcessRewardModel": Entry("qwen2", LABELS),
    "TransformersEmbeddingModel": Entry("qwen3"),
    "TransformersMoEEmbeddingModel": Entry("qwen3_moe"),
    "TransformersForSequenceClassification": Entry("qwen3", LABELS),
    "TransformersMoEForSequenceClassification": Entry("qwen3_moe", LABELS),
    "TransformersMultiModalEmbeddingModel": Entry("qwen2_vl"),
    "TransformersMultiModalForSequenceClassification": Entry("gemma3", LABELS),
    "TransformersMultiModalForCausalLM": Entry("qwen2_vl"),
    "TransformersMultiModalMoEForCausalLM": Entry("qwen3_vl_moe"),
    "TransformersForCausalLM": Entry("qwen3"),
    "TransformersMoEForCausalLM": Entry("qwen3_moe"),
    "HunYuanDenseV1ForCausalLM": Entry(changes={"head_dim": 32}),
    "HunYuanMoEV1ForCausalLM": Entry(changes={"head_dim": 32}),
    "Qwen3ASRForcedAlignerForTokenClassification": Entry(
        "qwen3_asr", {"thinker_config": {"classify_num": 8}, "classify_num": 8}
    ),
    "JinaVLForRanking": Entry("qwen2_vl", LABELS),
}
