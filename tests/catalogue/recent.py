"""Facts of families with mixtures of experts that were published since August 2026."""

from tests.catalogue import nemotron_vl, qwen4_exp
from tests.catalogue.common import (
    DSA,
    FP8,
    GDN_PLAIN,
    GLM5_NEXT,
    HEAD,
    KIMI_K3,
    NEMOTRON_EXPERTS,
    PLAIN,
    QWEN4_EXP,
    QWEN4_EXP_FIELDS,
    QWEN35_EXPERTS,
    QWEN35_EXPERTS_TEXT,
    ROUTER,
    TOWERS,
    W4A4,
)
from tests.catalogue.family import Family
from tests.catalogue.wrapped import around_text
from vllm_fp4_plugin.formats.kind import Kind

_ROUTED: dict[str, Kind] = {"*.mlp.experts.*": W4A4, "*": PLAIN}
_QWEN38_MIXED = (
    HEAD
    | ROUTER
    | GDN_PLAIN
    | {"*.mlp.experts.*": W4A4, "*shared_expert*": PLAIN, "*": Kind.FP8_CHANNEL}
)
_LINEAR_ATTENTION = "--mamba-block-size can only be set with --enable-prefix-caching"
_NO_CONFIG = "'Glm5NextTextConfig' object has no attribute"
_CHANNELS = "FP8 per channel, as in RedHat's Hy3"

RECENT: tuple[Family, ...] = (
    Family(
        "Qwen 3.8 Flash Next (hybrid GDN, experts, n-gram table, vision), mixed",
        ("nvidia/Qwen3.8-Flash-Next-NVFP4",),
        QWEN4_EXP,
        _ROUTED,
        multimodal=True,
        fields=QWEN4_EXP_FIELDS,
        surround=qwen4_exp.surround,
    ),
    Family(
        "Qwen 3.8 Flash Next (hybrid GDN, experts, n-gram table, vision), compressed-tensors",
        ("RedHatAI/Qwen3.8-Flash-Next-NVFP4",),
        QWEN4_EXP,
        _ROUTED,
        format="compressed-tensors",
        multimodal=True,
        fields=QWEN4_EXP_FIELDS,
        note="all but the experts in 16 bits",
    ),
    Family(
        "Qwen 3.5 (hybrid GDN, experts, vision), mixed",
        ("nvidia/Qwen3.5-397B-A17B-NVFP4-V2",),
        QWEN35_EXPERTS,
        HEAD | TOWERS | ROUTER | GDN_PLAIN | {"*.mlp.experts.*": W4A4, "*": FP8},
        fp8_kv=True,
        multimodal=True,
        note="linear attention in FP8, as attention is, and the KV cache, as in Qwen 3.6",
    ),
    Family(
        "Qwen 3.8 (hybrid GDN, experts)",
        ("Inferact/Qwen3.8-2.4T-A95B-NVFP4",),
        QWEN35_EXPERTS_TEXT,
        HEAD | ROUTER | {"*self_attn*": PLAIN, "*linear_attn*": PLAIN, "*": W4A4},
    ),
    Family(
        "Qwen 3.8 (hybrid GDN, experts), mixed compressed-tensors",
        ("RedHatAI/Qwen3.8-2.4T-A95B-NVFP4-FP8",),
        QWEN35_EXPERTS_TEXT,
        _QWEN38_MIXED,
        format="compressed-tensors",
        note=_CHANNELS,
    ),
    Family(
        "Qwen 3.8 (hybrid GDN, pruned experts), mixed compressed-tensors",
        ("RedHatAI/Qwen3.8-2.4T-A95B-NVFP4-REAP-25", "RedHatAI/Qwen3.8-2.4T-A95B-NVFP4-REAP-50"),
        QWEN35_EXPERTS_TEXT | {"num_experts": 6},
        _QWEN38_MIXED,
        format="compressed-tensors",
        note=f"{_CHANNELS}; a number of experts that is no multiple of 8",
    ),
    Family(
        "GLM 5.3 (MLA, sparse attention, experts)",
        ("Inferact/GLM-5.3-NVFP4",),
        DSA | {"model_type": "glm_moe_dsa"},
        _ROUTED,
        by_headers="Sparse Attention is not supported on CPU",
        only_gpu=True,
        note="ModelOpt's format, as in nvidia's GLM 5.2",
    ),
    Family(
        "GLM 5.3 Flash (linear and sparse attention, experts, vision)",
        ("nvidia/GLM-5.3-Flash-NVFP4",),
        GLM5_NEXT,
        {"*.mlp.experts.*": W4A4, "*language_model.layers.?.mlp.*_proj": W4A4, "*": PLAIN},
        fp8_kv=True,
        multimodal=True,
        by_headers=_NO_CONFIG,
        only_gpu=True,
        on_cpu=_LINEAR_ATTENTION,
    ),
    Family(
        "GLM 5.3 Flash (linear and sparse attention, experts, vision), compressed-tensors",
        ("RedHatAI/GLM-5.3-Flash-NVFP4",),
        GLM5_NEXT,
        _ROUTED,
        format="compressed-tensors",
        multimodal=True,
        by_headers=_NO_CONFIG,
        only_gpu=True,
        on_cpu=_LINEAR_ATTENTION,
        note="no MTP layers, which are FP8 blocks",
    ),
    Family(
        "Kimi K3 (linear attention, MLA, experts, vision), compressed-tensors",
        ("RedHatAI/Kimi-K3-NVFP4", "RedHatAI/Kimi-K3-NVFP4-REAP25"),
        KIMI_K3,
        {"*.experts.*": W4A4, "*": PLAIN},
        format="compressed-tensors",
        architecture="KimiK3ForConditionalGeneration",
        renamed={"^": "language_model."},
        surround=around_text("kimi_k3"),
        by_headers="image processor",
        only_gpu=True,
        on_cpu=_LINEAR_ATTENTION,
        note="no vision tower",
    ),
    Family(
        "Kimi K3 (linear attention, MLA, experts, vision), mixed",
        ("nvidia/Kimi-K3-NVFP4",),
        KIMI_K3,
        {"*.experts.*": W4A4, "*self_attn.[qkvo]_proj": Kind.FP8_BLOCK, "*": PLAIN},
        architecture="KimiK3ForConditionalGeneration",
        renamed={"^": "language_model."},
        surround=around_text("kimi_k3"),
        by_headers="image processor",
        only_gpu=True,
        on_cpu=_LINEAR_ATTENTION,
        note="q, k, v and o in FP8 blocks; no vision tower",
    ),
    Family(
        "Nemotron 3.5 Super VL (Mamba-2 hybrid, latent experts, vision), mixed",
        ("nvidia/NVIDIA-Nemotron-3.5-Super-VL-120B-A12B-NVFP4",),
        NEMOTRON_EXPERTS | {"moe_latent_size": 64},
        HEAD
        | {
            "vision_model*": PLAIN,
            "mlp1*": PLAIN,
            "*.mixer.gate": PLAIN,
            "*latent*": PLAIN,
            "*.mixer.[qkvo]_proj": PLAIN,
            "*.mixer.experts.*": W4A4,
            "*": FP8,
        },
        fp8_kv=True,
        renamed={"^": nemotron_vl.PREFIX},
        by_headers="is_act_and_mul=False is supported only for CUDA",
        only_gpu=True,
        note="precision of each layer as in Nemotron 3 Super",
        surround=nemotron_vl.surrounding("NemotronH_Omni_Reasoning_V3"),
    ),
)
