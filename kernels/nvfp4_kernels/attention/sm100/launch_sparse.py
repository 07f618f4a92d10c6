"""Launch of the attention kernel on sm_100: ``sparse_attention``."""

import math

from torch import Tensor

from nvfp4_kernels.attention.call import SparseCall
from nvfp4_kernels.attention.sm100.launch import Inputs, KeyValues, run
from nvfp4_kernels.checks import InvalidArgument, check_rows
from nvfp4_kernels.devices import device_facts

MAX_MAP_ROWS = 2**31 - 1  # coordinates of a tensor map are int32


def sparse_attention(call: SparseCall) -> tuple[Tensor, Tensor]:
    """See ``nvfp4_kernels.attention.sparse_op.sparse_attention``.

    Raises:
        InvalidArgument: a cache whose rows no tensor map can address, a D that is not a multiple of
            32 with an E4M3 cache, or rows that are not 16-byte aligned.
    """
    q, kv_cache, indices, lens, block_table, query_start, sinks, k_scale, v_scale, *_ = call
    head_dim = q.shape[-1]
    facts = device_facts(q.device)
    check_rows(facts.arch, kv_cache=kv_cache)
    map_stride, map_rows = gather_view(kv_cache, facts.arch)
    key_values = KeyValues(
        "indexed",
        kv_cache[..., :head_dim],
        kv_cache[..., head_dim:],
        query_start=query_start,
        seq_lens=lens,
        block_table=block_table,
        indices=indices,
        k_scale=k_scale,
        v_scale=v_scale,
        map_stride=map_stride,
        map_rows=map_rows,
    )
    sizes = len(q), 1, indices.shape[1]
    return run(Inputs(facts, q, key_values, sinks, *sizes, call.scoring, call.out))


def gather_view(kv_cache: Tensor, arch: str) -> tuple[int, int]:
    """Row stride and number of rows of a two-dimensional view in which every key is a row.

    TMA gathers take two dimensions (PTX ISA, .tile::gather4): strides of pages, heads and rows of a
    page must be multiples of one stride. The view may have other rows between keys.

    Args:
        kv_cache: ``(pages, Hkv, page_size, 2·D)``.
        arch: architecture, for error messages.

    Returns:
        Stride of the view's rows in elements, and number of rows.

    Raises:
        InvalidArgument: the view's rows would overlap, or there are too many.
    """
    *counts, width = kv_cache.shape
    dims = [(n, stride) for n, stride in zip(counts, kv_cache.stride(), strict=False) if n > 1]
    common = math.gcd(*(stride for _, stride in dims)) or width
    if common < width // 2:
        raise InvalidArgument(
            f"kv_cache: strides are {kv_cache.stride()}, multiples of {common} elements, must be "
            f"multiples of one stride of at least D, {width // 2}, for TMA gathers on {arch}; give "
            f"every page {width} elements per key and head, and no odd ones between pages"
        )
    rows = 1 + sum((n - 1) * stride for n, stride in dims) // common
    if rows > MAX_MAP_ROWS:
        raise InvalidArgument(
            f"kv_cache: spans {rows} rows of {common} elements, must span at most {MAX_MAP_ROWS} "
            f"for TMA gathers on {arch}; use fewer pages, or lay them closer together"
        )
    return common, rows
