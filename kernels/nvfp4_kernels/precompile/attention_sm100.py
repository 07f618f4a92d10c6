"""Kernels that a model's attention needs on sm_100. No CuTe."""

from dataclasses import replace
from itertools import product
from typing import Literal

from nvfp4_kernels.attention.kernels import HEAD_DIMS
from nvfp4_kernels.attention.sm100.choose import AttentionProblem, choose_config
from nvfp4_kernels.attention.sm100.tile import KEYS, AttentionTile, Variant
from nvfp4_kernels.dispatch import Mode
from nvfp4_kernels.merge_segments.choose import MAX_PREFETCH
from nvfp4_kernels.merge_segments.tile import MergeTile
from nvfp4_kernels.nvfp4_rows import HEAD_COLUMNS, ROW_COLUMNS
from nvfp4_kernels.precompile.model import Attention, Dtype
from nvfp4_kernels.precompile.spec import KernelSpec
from nvfp4_kernels.sm100.limits import SMS

# What the KV cache holds: the model's own dtype, or E4M3.
Cache = Literal["auto", "fp8"]
CACHES: tuple[Cache, ...] = ("auto", "fp8")
PAGE_SIZE = 16  # keys: vLLM's default


def attention_kernels(
    attention: Attention,
    dtype: Dtype,
    *,
    caches: tuple[Cache, ...] = CACHES,
    page_size: int = PAGE_SIZE,
    sms: int = SMS,
    quantized: bool = False,
) -> dict[KernelSpec, list[str]]:
    """Kernels of all batches, prefill or decode: each tile that may be chosen, split or not.

    With ``quantized``, those whose result leaves as NVFP4. Splits of a prefill, whose rows are of
    several CTAs, are merged by a kernel apart.
    """
    found: list[KernelSpec] = []
    for window, cache in product(attention.windows, caches):
        arch_mode: tuple[str, Mode] = ("sm_100", "fp8_kv" if cache == "fp8" else "float")
        if attention.head_dim not in HEAD_DIMS[arch_mode]:
            continue  # served by another backend of vLLM's, as it says at start
        for tile, split in _attention_tiles(attention, cache == "fp8", window, sms):
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
            if split and (tile.query_tiles == 2 or attention.head_dim > 128):
                apart = replace(variant, sinks=False, quantized=False, merges=False)
                found.append(attention_spec(tile, apart))
    if found:
        sizes = dtype, attention.head_dim, attention.sinks
        found += [merge_spec(*sizes, 2**i, quantized) for i in range(MAX_PREFETCH.bit_length())]
    return {spec: ["attention"] for spec in dict.fromkeys(found)}


def hands_over(attention: Attention, activation: str, terms: int) -> bool:
    """Whether attention quantises for a product whose input is quantised so."""
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
    """Spec of the kernel that merges splits."""
    target = "nvfp4_kernels.merge_segments.sm100:MergeSegmentsSm100"
    tile = MergeTile("float32", dtype, head_dim, sinks, prefetch, quantized)
    return KernelSpec("merge_segments", target, (tile,))


def _attention_tiles(
    attention: Attention, fp8: bool, window: int, sms: int
) -> list[tuple[AttentionTile, bool]]:
    """Tiles and whether they split keys, over batches from one token to a long prompt."""
    group = attention.query_heads // attention.kv_heads
    chosen = []
    for queries, keys in product((1, 2 * KEYS), (KEYS, 1 << 20)):
        problem = AttentionProblem(
            1, queries, keys, attention.kv_heads, group, attention.head_dim, fp8, window
        )
        tile, splits = choose_config(problem, sms)
        chosen.append((tile, splits > 1))
    return list(dict.fromkeys(chosen))
