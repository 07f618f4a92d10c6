"""Functions that write keys and values to vLLM's paged cache, and quantise to E4M3 for it."""

from typing import Any

import torch
from torch import Tensor

FP8_DTYPES = ("fp8", "fp8_e4m3")  # two vLLM names for one dtype
E4M3 = torch.float8_e4m3fn
E4M3_MAX = torch.finfo(E4M3).max


def typed(kv_cache: Tensor, *, fp8: bool) -> Tensor:
    """View of the cache in the dtype of its values; vLLM allocates an FP8 cache as uint8."""
    return kv_cache.view(E4M3) if fp8 else kv_cache


def quantize(x: Tensor, scale: Tensor) -> Tensor:
    """E4M3 codes of ``x / scale``, rounded to nearest even, saturating: uint8 of x's shape."""
    scaled = x.float() / scale
    # Some versions of torch do not saturate here.
    return scaled.clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3).view(torch.uint8)


def quantized_queries(query: Tensor, scale: Tensor) -> Tensor:
    """E4M3 queries for FlashAttention 3: ``query / scale``, by vLLM's kernel on a GPU.

    Args:
        query: 16-bit ``(T, Hq, D)``.
        scale: float32 ``()``.
    """
    if not query.is_cuda:
        return quantize(query, scale).view(E4M3)
    from vllm import _custom_ops

    rows, _ = _custom_ops.scaled_fp8_quant(query.flatten(1), scale)
    return rows.view(query.shape)


def write(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Store this step's keys and values; tokens with a negative slot are skipped.

    Args:
        key: 16-bit ``(≥ T, Hkv, D)``.
        value: 16-bit, shaped as ``key``.
        kv_cache: ``(pages, Hkv, page_size, 2·D)`` of key's dtype, or uint8 for E4M3.
        slot_mapping: int64 ``(T,)``, ``page · page_size + offset``.
        k_scale: float32 ``()``, key = stored E4M3 value · ``k_scale``; None for a 16-bit cache.
        v_scale: as ``k_scale``, for the values.
    """
    tokens = slot_mapping.shape[0]
    key, value = key[:tokens], value[:tokens]
    if k_scale is not None and v_scale is not None:
        key, value = quantize(key, k_scale), quantize(value, v_scale)
    pairs = torch.cat([key, value], -1)
    if tokens and int(slot_mapping.min()) < 0:
        live = slot_mapping >= 0
        slot_mapping, pairs = slot_mapping[live], pairs[live]
    by_slot = kv_cache.transpose(1, 2)  # (pages, page_size, Hkv, 2·D)
    page_size = by_slot.shape[1]
    by_slot[slot_mapping // page_size, slot_mapping % page_size] = pairs


def write_cuda(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    layer: Any,
) -> None:
    """Store as ``write`` does, with vLLM's own kernel, which CUDA graphs can capture.

    ``kv_cache_dtype`` is vLLM's name of the cache's dtype; ``layer`` holds the scales of an FP8
    cache.
    """
    from vllm import _custom_ops

    key_cache, value_cache = kv_cache.transpose(1, 2).chunk(2, dim=-1)
    _custom_ops.reshape_and_cache_flash(
        key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype,
        layer._k_scale, layer._v_scale,
    )  # fmt: skip
