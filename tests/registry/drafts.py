"""Miniatures of speculative decoders, each beside a target."""

from typing import Any

from tests.registry.entry import Draft, Entry
from tests.registry.text import bag

ONE: dict[str, Any] = {"num_nextn_predict_layers": 1}
EAGLE3 = {"draft_vocab_size": 320, "target_hidden_size": 128}


def eagle(target: str, method: str = "eagle", **fields: Any) -> Draft:
    """Draft of Llama's shape with a config of its own."""
    return Draft(target, method, Entry("llama", fields))


DRAFTS: dict[str, Draft] = {
    "MiMoMTPModel": Draft("MiMoForCausalLM"),
    "MiMoV2MTPModel": Draft("MiMoV2ForCausalLM"),
    "MiMoV2OmniMTPModel": Draft("MiMoV2OmniForCausalLM"),
    "EagleCohereForCausalLM": Draft("CohereForCausalLM", "eagle", Entry("cohere")),
    "EagleLlamaForCausalLM": eagle("LlamaForCausalLM"),
    "EagleLlama4ForCausalLM": Draft("Llama4ForCausalLM", "eagle", Entry("llama4_text")),
    "EagleMiniCPMForCausalLM": Draft(
        "MiniCPMForCausalLM", "eagle",
        bag("minicpm", num_experts=0, num_experts_per_tok=0, scale_emb=12, scale_depth=1.4,
            dim_model_base=64),
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
        "DeepseekV3ForCausalLM", "eagle3", Entry("deepseek_v3", EAGLE3)
    ),
    "Eagle3DeepseekV3ForCausalLM": Draft(
        "DeepseekV3ForCausalLM", "eagle3", Entry("deepseek_v3", EAGLE3)
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
    "Gemma4MTPModel": Draft("Gemma4ForCausalLM", "mtp", Entry("gemma4_assistant")),
    "ErnieMTPModel": Draft("Ernie4_5_MoeForCausalLM", changes=ONE),
    "ExaoneMoeMTP": Draft("ExaoneMoeForCausalLM", changes=ONE),
    "Exaone4_5_MTP": Draft("Exaone4_5_ForConditionalGeneration", changes=ONE),
    "NemotronHMTPModel": Draft("NemotronHForCausalLM", changes=ONE),
    "LongCatFlashMTPModel": Draft("LongcatFlashForCausalLM", changes=ONE),
    "Glm4MoeMTPModel": Draft("Glm4MoeForCausalLM", changes=ONE),
    "Glm4MoeLiteMTPModel": Draft("Glm4MoeLiteForCausalLM", changes=ONE),
    "GlmOcrMTPModel": Draft("GlmOcrForConditionalGeneration", changes=ONE),
    "Glm5NextMTPModel": Draft("Glm5NextForConditionalGeneration", changes={"text_config": ONE}),
    "MedusaModel": Draft("LlamaForCausalLM", "medusa", Entry("medusa")),
    "OpenPanguMTPModel": Draft("PanguUltraMoEForCausalLM", changes=ONE),
    "Qwen3NextMTP": Draft("Qwen3NextForCausalLM", changes=ONE),
    "Qwen4ExpMTP": Draft("Qwen4ExpForCausalLM", changes=ONE),
    "Step3p5MTP": Draft("Step3p5ForCausalLM", changes=ONE),
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
        "Qwen3ForCausalLM", "dflash",
        Entry("qwen3", {"dflash_config": {"mask_token_id": 5, "target_layer_ids": [0, 1]},
                        "block_size": 4, "num_target_layers": 2}),
    ),
    "Qwen3DSparkModel": Draft("Qwen3ForCausalLM", "dspark", Entry("qwen3")),
}  # fmt: skip
