"""Kernels of rotary embedding and KV-cache store for a model, for any number of tokens.

Imports no CuTe. One source serves sm_90 and sm_100.
"""

from itertools import product

from nvfp4_kernels.attention.kernels import HEAD_DIMS
from nvfp4_kernels.precompile.attention_sm100 import CACHES, Cache
from nvfp4_kernels.precompile.model import PAGE_SIZE, Attention, Dtype
from nvfp4_kernels.precompile.spec import KernelSpec
from nvfp4_kernels.rotary.store.choose import choose_config
from nvfp4_kernels.rotary.store.tile import PART, Variant
from nvfp4_kernels.sm100.limits import SMS


def rotary_store_kernels(
    attention: Attention,
    dtype: Dtype,
    *,
    max_tokens: int,
    caches: tuple[Cache, ...] = CACHES,
    page_size: int = PAGE_SIZE,
    sms: int = SMS,
) -> dict[KernelSpec, list[str]]:
    """Specs for vLLM's arguments: int64 positions, angles and norms in the model's dtype.

    Args:
        attention: attention layers, with the heads on one GPU.
        dtype: dtype of activations.
        max_tokens: maximum number of tokens in a batch; all numbers from 1 on are covered.
        caches: possible dtypes of the KV cache.
        page_size: tokens per page.
        sms: SMs of the GPU.

    Returns:
        Specs; empty if the rotary dimension is not a multiple of 16, or if attention supports the
        head dimension with none of the caches.
    """
    rotary_dim = attention.rotary_dim or attention.head_dim
    if rotary_dim % PART:
        return {}
    sizes = attention.query_heads, attention.kv_heads, attention.head_dim, rotary_dim
    tiles = dict.fromkeys(choose_config(tokens, *sizes, sms) for tokens in (1, max_tokens))
    found: dict[KernelSpec, list[str]] = {}
    for cache, tile in product(caches, tiles):
        fp8 = cache == "fp8"
        if attention.head_dim not in HEAD_DIMS["sm_100", "fp8_kv" if fp8 else "float"]:
            continue
        variant = Variant(
            dtype=dtype,
            table_dtype=dtype,
            position_dtype="int64",
            page_size=page_size,
            neox=attention.neox,
            fp8=fp8,
            q_norm=attention.qk_norm,
            k_norm=attention.qk_norm,
            norm_dtype=dtype,
        )
        target = "nvfp4_kernels.rotary.store.kernel:RotaryStore"
        found[KernelSpec("rotary_store", target, (tile, variant))] = ["rotary embedding, store"]
    return found
