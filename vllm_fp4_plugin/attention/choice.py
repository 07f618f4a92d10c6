"""Choice of the attention backend where the user names none."""

from typing import Any

import torch
from vllm import envs
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from nvfp4_kernels.devices import dtype_name
from vllm_fp4_plugin.attention.backend import PagedAttentionBackend
from vllm_fp4_plugin.attention.cache import FP8_DTYPES
from vllm_fp4_plugin.attention.capability import implementation
from vllm_fp4_plugin.device import is_planned
from vllm_fp4_plugin.report import LayerRecord

_REQUEST = "--attention-backend CUSTOM asks for it"
# Models whose layers assert that they have FlashInfer's implementation.
_FLASHINFER_ALONE = ("flint",)
# vLLM's models whose layers have sinks: always, or if this field of the config is set.
_ALWAYS_SINKS = ("gpt_oss", "openai_privacy_filter")
_SINK_FLAGS = (
    "add_full_attention_sink_bias",
    "add_swa_attention_sink_bias",
    "swa_attention_sink_enabled",
)
# Models with layers that vLLM's configs do not describe: latent attention of model types that
# ``use_mla`` does not list, and chunked attention whose queries see the previous chunk.
_LATENT = ("sarvam_mla",)
_LOOKING_BACK = ("Rnj1ForCausalLM",)


def make_default(vllm_config: Any) -> str:
    """Choose ``CUSTOM`` for a model that it can serve, unless the user names a backend.

    vLLM selects a layer's backend when it builds the layer; a choice made in the config before acts
    like the user's.

    Returns:
        Reason, for reports, why the backend is ``CUSTOM`` or another.
    """
    attention = vllm_config.attention_config
    if attention.backend_per_kind:
        return "named by backend_per_kind"
    if attention.backend is not None:
        sizes = sorted(set(_head_sizes(vllm_config.model_config.model_arch_config)))
        if len(sizes) > 1:  # vLLM sets one itself, and does not record that
            return f"--attention-backend {attention.backend.name}, or vLLM's for heads of {sizes}"
        return f"--attention-backend {attention.backend.name}"
    custom = AttentionBackendEnum.CUSTOM
    if not custom.is_overridden() or custom.get_class() is not PagedAttentionBackend:
        return "another plugin holds the name CUSTOM"
    reasons = unsupported_reasons(vllm_config)
    if reasons:
        return f"not CUSTOM: {'; '.join(reasons)}"
    attention.backend = custom
    return "by default"


def drafts_reason(attention: Any) -> str:
    """Reason, for reports, for the attention backend of a draft model that shares our config.

    vLLM chooses the draft's backend separately, from the draft's own ``attention`` config.
    """
    if attention.backend is not None:
        return f"the draft's attention_backend is {attention.backend.name}"
    return "vLLM's choice for the draft"


def unsupported_reasons(vllm_config: Any) -> list[str]:
    """Reasons why the model's attention cannot run on our kernels; empty if it can."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel, speculative = vllm_config.parallel_config, vllm_config.speculative_config
    if model.attn_type not in ("decoder", "hybrid"):
        return [f"{model.attn_type} attention is not supported"]
    transfer = vllm_config.kv_transfer_config
    scheme = getattr(vllm_config.quant_config, "kv_cache_scheme", None) or {}
    reasons = PagedAttentionBackend.validate_configuration(
        head_size=_head_size(model.model_arch_config),
        dtype=model.dtype,
        kv_cache_dtype=cache.cache_dtype,
        block_size=cache.block_size if cache.user_specified_block_size else None,
        use_mla=model.use_mla,
        has_sink=False,
        use_sparse=False,
        use_mm_prefix=model.is_mm_prefix_lm,
        use_per_head_quant_scales=scheme.get("strategy") == "attn_head",
        device_capability=current_platform.get_device_capability(),
        attn_type="decoder",
        use_non_causal=vllm_config.attention_config.use_non_causal,
        use_batch_invariant=envs.VLLM_BATCH_INVARIANT,
        use_kv_connector=transfer is not None and transfer.is_kv_transfer_instance,
        use_pcp=parallel.prefill_context_parallel_size > 1,
        use_adaptive_verification=bool(speculative and speculative.enable_adaptive_verification),
        use_dcp=parallel.decode_context_parallel_size > 1,
        use_rswa=model.rswa_window is not None,
    )
    text = model.hf_text_config
    ours = implementation()
    if ours.max_group is not None:
        group = _group(model.model_arch_config, parallel)
        if group > ours.max_group:
            reasons.append(f"{group} query heads share a KV head, must be at most {ours.max_group}")
    reasons += [
        f"{what} with it on a GPU of this kind; {_REQUEST}" for what in _untried(vllm_config)
    ]
    if not ours.sinks and _has_sinks(text):
        reasons.append("attention sinks are not supported on this device")
    if text.model_type in _LATENT:
        reasons.append("MLA not supported")
    if model.architecture in _LOOKING_BACK and "chunked_attention" in _layer_types(text):
        reasons.append("chunks with lookback are not supported")
    if getattr(text, "alibi", False) or text.model_type in ("bloom", "step1"):
        reasons.append("linear biases (ALiBi) are not supported")
    if text.model_type in _FLASHINFER_ALONE:
        reasons.append(f"vLLM's layers of {text.model_type} write FlashInfer's cache themselves")
    return reasons


def _untried(vllm_config: Any) -> list[str]:
    """Parts of the model's attention that are served on request alone."""
    ours, untried = implementation(), []
    if not ours.fp8_by_default and vllm_config.cache_config.cache_dtype in FP8_DTYPES:
        untried.append("an FP8 KV cache has not run")
    if ours.default_head_sizes is not None:
        architecture = vllm_config.model_config.model_arch_config
        sizes = {*_head_sizes(architecture), int(architecture.head_size)}
        known = ours.head_sizes("auto")
        new = [d for d in known if d in sizes and d not in ours.default_head_sizes]
        untried += [f"heads of {d} have not run" for d in new]
    return untried


def _has_sinks(text: Any) -> bool:
    """Whether vLLM builds layers with sinks for a model; vLLM exposes this only per layer."""
    if text.model_type.startswith("granite"):
        given = getattr(text, "attention_sinks", None)
        return getattr(text, "layer_types", None) is not None if given is None else bool(given)
    return text.model_type in _ALWAYS_SINKS or any(getattr(text, n, False) for n in _SINK_FLAGS)


def _layer_types(text: Any) -> list[str]:
    """Attention type of each layer, from the model's config; empty if the config names no types."""
    return getattr(text, "layer_types", None) or []


def _group(architecture: Any, parallel: Any) -> int:
    """Number of query heads per KV head (qhead_per_kvhead) on one rank."""
    ranks = parallel.tensor_parallel_size
    heads, kv_heads = architecture.total_num_attention_heads, architecture.total_num_kv_heads
    return -(-heads // ranks) // max(1, kv_heads // ranks)


def _head_sizes(architecture: Any) -> list[int]:
    """Head size of each layer."""
    layers = range(architecture.total_num_hidden_layers)
    return [int(architecture[i].head_size) for i in layers]


def _head_size(architecture: Any) -> int:
    """First unsupported head size of a layer; the model's head size if all are supported."""
    sizes = _head_sizes(architecture)
    unsupported = (d for d in sizes if not PagedAttentionBackend.supports_head_size(d))
    return int(next(unsupported, architecture.head_size))


def record(layer: Any, prefix: str, reason: str) -> LayerRecord:
    """Record of an attention layer for the report, once vLLM has chosen its backend."""
    backend, dtype = layer.get_attn_backend(), layer.kv_cache_dtype
    if dtype == "auto":
        # MLA layers store no dtype; the model's default is current when they are built and
        # reported.
        dtype = dtype_name(getattr(layer, "dtype", torch.get_default_dtype()))
    elif dtype in FP8_DTYPES:
        dtype = "fp8_e4m3"  # alias of the same dtype
    ours = issubclass(backend, PagedAttentionBackend)
    theirs = "of vLLM's choice" if is_planned() else f"{backend.get_name()} (vLLM)"
    runs = implementation().label(layer.kv_cache_dtype) if ours else theirs
    # vLLM requests the record again after binding the layer to the next one.
    note = getattr(getattr(layer, "impl", None), "note", "")
    reason = "; ".join(filter(None, (reason, note)))
    return LayerRecord(prefix, runs, f"{dtype} KV cache", reason, 0, 0)
