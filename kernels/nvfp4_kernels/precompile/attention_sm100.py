"""Kernels that a model's attention needs on sm_100. Imports no CuTe."""

from dataclasses import replace
from itertools import product
from typing import Literal

from nvfp4_kernels.attention.kernels import HEAD_DIMS, MAX_ROTARY_ROWS
from nvfp4_kernels.attention.merge.choose import MAX_PREFETCH
from nvfp4_kernels.attention.merge.tile import MergeTile
from nvfp4_kernels.attention.sm100.choose import AttentionProblem, choose_config
from nvfp4_kernels.attention.sm100.tile import KEYS, AttentionTile, Rotation, Variant
from nvfp4_kernels.dispatch import Mode
from nvfp4_kernels.formats.nvfp4_rows import HEAD_COLUMNS, ROW_COLUMNS
from nvfp4_kernels.precompile.model import PAGE_SIZE, Attention, Dtype
from nvfp4_kernels.precompile.spec import KernelSpec
from nvfp4_kernels.rotary.store import tile as rotary_store
from nvfp4_kernels.rotary.store.tile import HeadTile
from nvfp4_kernels.sm100.limits import SMS, WARP_ROWS

# Dtype of the KV cache: the model's own dtype, or E4M3.
Cache = Literal["auto", "fp8"]
CACHES: tuple[Cache, ...] = ("auto", "fp8")


def attention_kernels(
    attention: Attention,
    dtype: Dtype,
    *,
    caches: tuple[Cache, ...] = CACHES,
    page_size: int = PAGE_SIZE,
    sms: int = SMS,
    quantized: bool = False,
    rotates: bool = False,
    batch_invariant: bool = False,
) -> dict[KernelSpec, list[str]]:
    """Kernels for all batches, prefill or decode: every possible tile, with and without split-KV.

    If the rows of a sequence's KV head belong to several CTAs, as in a prefill, a separate kernel
    merges the splits; else the last CTA does.

    Args:
        attention: attention layers, with the heads on one GPU.
        dtype: dtype of activations.
        caches: possible dtypes of the KV cache; unsupported combinations are skipped.
        page_size: tokens per page.
        sms: SMs of the GPU.
        quantized: whether the result is NVFP4.
        rotates: whether to add kernels with fused rotary embedding and KV-cache store where
            supported, for angles and norms in the model's dtype.
        batch_invariant: whether attention is batch-invariant: one tile, and no split-KV.
    """
    found: list[KernelSpec] = []
    for window, cache in product(attention.windows, caches):
        arch_mode: tuple[str, Mode] = ("sm_100", "fp8_kv" if cache == "fp8" else "float")
        if attention.head_dim not in HEAD_DIMS[arch_mode]:
            continue  # served by another backend of vLLM's, as it says at start
        for tile, split, rows in _attention_tiles(
            attention, cache == "fp8", window, sms, batch_invariant
        ):
            variant = Variant(
                dtype,
                "paged",
                page_size,
                causal=True,
                window=window > 0,
                soft_cap=attention.soft_cap,
                sinks=attention.sinks,
                split=split,
                quantized=quantized,
                merges=split,
            )
            if not split or tile.query_tiles == 1:
                found.append(attention_spec(tile, variant))
                if rotates and rows <= MAX_ROTARY_ROWS:
                    how = _rotation(attention, dtype, cache == "fp8", page_size)
                    found.append(attention_spec(tile, replace(variant, rotation=how)))
            if split and (tile.query_tiles == 2 or attention.head_dim > 128):
                apart = replace(variant, sinks=False, quantized=False, merges=False)
                found.append(attention_spec(tile, apart))
    if found and not batch_invariant:
        sizes = dtype, attention.head_dim, attention.sinks
        found += [merge_spec(*sizes, 2**i, quantized) for i in range(MAX_PREFETCH.bit_length())]
    return {spec: ["attention"] for spec in dict.fromkeys(found)}


def hands_over(attention: Attention, activation: str, terms: int) -> bool:
    """Whether attention quantises o_proj's input: if static, in one term, and of fitting sizes."""
    whole = attention.head_dim % HEAD_COLUMNS == 0
    rows = attention.query_heads * attention.head_dim % ROW_COLUMNS == 0
    return activation == "static" and terms == 1 and whole and rows


def attention_spec(tile: AttentionTile, variant: Variant) -> KernelSpec:
    """Spec of an attention kernel."""
    op = "paged_attention" if variant.layout == "paged" else "attention"
    return KernelSpec(op, "nvfp4_kernels.attention.sm100.kernel:FmhaSm100", (tile, variant))


def merge_spec(
    dtype: Dtype, head_dim: int, sinks: bool, prefetch: int, quantized: bool = False
) -> KernelSpec:
    """Spec of a kernel that merges the float32 results of splits."""
    target = "nvfp4_kernels.attention.merge.sm100:MergeSegmentsSm100"
    tile = MergeTile("float32", dtype, head_dim, sinks, prefetch, quantized)
    return KernelSpec("merge_segments", target, (tile,))


def _rotation(attention: Attention, dtype: Dtype, fp8: bool, page_size: int) -> Rotation:
    """Fused rotation for vLLM's arguments: int64 positions, angles and norms in ``dtype``."""
    norms = attention.qk_norm
    how = rotary_store.Variant(
        dtype, dtype, "int64", page_size, attention.neox, fp8, norms, norms, dtype
    )
    heads = HeadTile(attention.head_dim, attention.rotary_dim or attention.head_dim)
    return Rotation(heads, how)


def _attention_tiles(
    attention: Attention, fp8: bool, window: int, sms: int, batch_invariant: bool
) -> list[tuple[AttentionTile, bool, int]]:
    """Tiles chosen for one token to a long prompt: tile, whether split-KV, rows per KV head."""
    group = attention.query_heads // attention.kv_heads
    more_than_a_warp = -(-(WARP_ROWS + 1) // group)
    chosen = []
    for queries, keys in product((1, more_than_a_warp, 2 * KEYS), (KEYS, 1 << 20)):
        problem = AttentionProblem(
            1, queries, keys, attention.kv_heads, group, attention.head_dim, fp8, window,
            batch_invariant=batch_invariant,
        )  # fmt: skip
        tile, splits = choose_config(problem, sms)
        chosen.append((tile, splits > 1, queries * group))
    return list(dict.fromkeys(chosen))
