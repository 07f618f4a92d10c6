"""Architectures that cannot be built here, with the reason for each."""

_SPARSE = "sparse attention, which vLLM's platform for CPUs refuses"
_GPU_EXPERTS = "vLLM has no experts with this activation for CPUs"
_TOKENIZER = "asks for its tokenizer as it is built"
_REMOTE = "its config class comes with remote code, and no miniature of it is written"
_OTHER_CONFIG = "vLLM's model reads fields that its config class does not make; not written here"
_SPARSE_GQA = "its sparse attention asks for CUDA as it is built"
_TRANSFORMERS = "asks for a transformers newer than the environment's"
_PACKAGE = "imports a package that vLLM's builds for CPUs go without"
_NOT_ON_CPU = "vLLM says that it is not implemented on CPUs"
_NAMED_OTHERWISE = "vLLM gives such a draft another name, under which it is built"

UNBUILT: dict[str, str] = {
    "ClefOmniForJointSchema": _REMOTE,
    "CohereAsrForConditionalGeneration": _OTHER_CONFIG,
    "DSparkDraftModel": _NOT_ON_CPU,
    "DSparkV41DraftModel": "its attention asks for CUDA as it is built",
    "DeepSeekV4MTPModel": _NOT_ON_CPU,
    "DeepseekOCR2ForCausalLM": _TOKENIZER,
    "DeepseekOCRForCausalLM": _TOKENIZER,
    "DeepseekV32ForCausalLM": _SPARSE,
    "DeepseekV32MTPModel": _SPARSE,
    "DeepseekV41ForCausalLM": "its attention asks for CUDA as it is built",
    "DeepseekV4ForConditionalGeneration": _NOT_ON_CPU,
    "DeepseekVLV2ForCausalLM": _TOKENIZER,
    "Dots3NoteForCausalLM": "imports flash attention for CUDA",
    "Dots3NoteMTPModel": "imports flash attention for CUDA",
    "Emu3ForConditionalGeneration": "vLLM's model for transformers' ones fails on it",
    "Ernie4_5_VLMoeForConditionalGeneration": _OTHER_CONFIG,
    "FireRedASR2ForConditionalGeneration": _REMOTE,
    "FlintForCausalLM": "asks for FlashInfer's attention, which is for CUDA",
    "FunASRForConditionalGeneration": _PACKAGE,
    "FunAudioChatForConditionalGeneration": _OTHER_CONFIG,
    "Gemma3nForConditionalGeneration": _PACKAGE,
    "Glm5NextForCausalLM": _SPARSE,
    "Glm5NextForConditionalGeneration": _SPARSE,
    "Glm5NextMTPModel": _SPARSE,
    "GlmMoeDsaForCausalLM": _SPARSE,
    "InternS1ProForConditionalGeneration": "vLLM's model reads an attribute that it never sets",
    "InternS2MobiusForConditionalGeneration": _REMOTE,
    "InternS2MobiusMTP": _REMOTE,
    "IsaacForConditionalGeneration": _TOKENIZER,
    "K3DSparkModel": _OTHER_CONFIG,
    "KananaVForConditionalGeneration": _PACKAGE,
    "KimiK25ForConditionalGeneration": "moves its tower as it is built, whose weights are on meta",
    "LiLiCorrDraftModel": _OTHER_CONFIG,
    "LlavaOnevision2ForConditionalGeneration": _REMOTE,
    "MiDashengLMModel": _PACKAGE,
    "MiniCPMO": _REMOTE,
    "MiniCPMV": _REMOTE,
    "MiniMaxM3MTP": _GPU_EXPERTS,
    "MiniMaxM3SparseForCausalLM": _GPU_EXPERTS,
    "MiniMaxM3SparseForConditionalGeneration": _GPU_EXPERTS,
    "Molmo2ForConditionalGeneration": _REMOTE,
    "MossAudioModel": _REMOTE,
    "MuseSparkForConditionalGeneration": "vLLM's model takes no quantization but modelopt's",
    "NanbeigeForCausalLM": _REMOTE,
    "NemotronH_Nano_Omni_Reasoning_V3": _TOKENIZER,
    "NemotronH_Nano_VL_V2": _TOKENIZER,
    "NemotronH_Omni_Reasoning_V3": _TOKENIZER,
    "NemotronH_Super_Omni_Reasoning_V3": _TOKENIZER,
    "NemotronParseForConditionalGeneration": _REMOTE,
    "OpenPanguVLForConditionalGeneration": _REMOTE,
    "OpenVLAForActionPrediction": _PACKAGE,
    "PEagleDraftModel": _NAMED_OTHERWISE,
    "PeagleLlamaForCausalLM": _NAMED_OTHERWISE,
    "PeagleQwen3ForCausalLM": _NAMED_OTHERWISE,
    "Phi4ForCausalLMV": _REMOTE,
    "Phi4MMForCausalLM": _REMOTE,
    "Qwen3OmniDSparkModel": "drafts as many tokens as it was trained for; others are refused",
    "Step1ForCausalLM": "its attention biases are not for CPUs",
    "Step3p5MTP": _OTHER_CONFIG,
    "Step3p7ForConditionalGeneration": _OTHER_CONFIG,
    "Step5ForCausalLM": _SPARSE_GQA,
    "Step5ForConditionalGeneration": _SPARSE_GQA,
    "Step5MTP": _SPARSE_GQA,
    "Terratorch": _PACKAGE,
    "TransformersForMTP": _TRANSFORMERS,
    "TransformersMoEForMTP": _TRANSFORMERS,
    "UnlimitedOCRForCausalLM": _TOKENIZER,
    "VoxtralForConditionalGeneration": _OTHER_CONFIG,
    "VoxtralRealtimeGeneration": _OTHER_CONFIG,
}

_READS = "reads values of tensors while it is built"
ONLY_CPU: dict[str, str] = {
    "ApertusForCausalLM": _READS,
    "BloomForCausalLM": _READS,
}
