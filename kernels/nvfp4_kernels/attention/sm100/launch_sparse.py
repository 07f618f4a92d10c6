"""``sparse_attention`` on sm_100."""

import math

from torch import Tensor

from nvfp4_kernels.attention.scoring import Scoring
from nvfp4_kernels.attention.sm100.launch import KeyValues, run
from nvfp4_kernels.checks import InvalidArgument, check_rows

MOST_ROWS = 2**31 - 1  # that coordinates of a tensor map reach


def sparse_attention(
    q: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
    lens: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    scoring: Scoring,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See ``nvfp4_kernels.attention.sparse_op.sparse_attention``.

    Raises:
        InvalidArgument: a cache whose rows no tensor map has, a D that is no multiple of 32 with an
            E4M3 cache, or strides that are no multiples of 16 bytes.
    """
    head_dim = q.shape[-1]
    check_rows("sm_100", kv_cache=kv_cache)
    step, rows = rows_of_map(kv_cache)
    given = KeyValues(
        "indexed",
        kv_cache[..., :head_dim],
        kv_cache[..., head_dim:],
        query_start=query_start,
        seq_lens=lens,
        block_table=block_table,
        indices=indices,
        k_scale=k_scale,
        v_scale=v_scale,
        map_step=step,
        map_rows=rows,
    )
    return run(q, given, sinks, len(q), 1, indices.shape[1], scoring, out)


def rows_of_map(kv_cache: Tensor) -> tuple[int, int]:
    """A two-dimensional view that has every key of a cache for a row, and other rows besides.

    Gathers know no more dimensions (PTX ISA, .tile::gather4): pages, heads and rows of a page must
    be whole steps of one length apart.

    Args:
        kv_cache: ``(pages, Hkv, page_size, 2·D)``.

    Returns:
        Elements from one row to the next, and how many rows there are.

    Raises:
        InvalidArgument: such rows would overlap, or be too many.
    """
    *counts, width = kv_cache.shape
    sizes = [(n, stride) for n, stride in zip(counts, kv_cache.stride(), strict=False) if n > 1]
    step = math.gcd(*(stride for _, stride in sizes)) or width
    if step < width // 2:
        raise InvalidArgument(
            f"kv_cache: strides are {kv_cache.stride()}, whole steps of {step} elements, must be "
            f"whole steps of at least D, {width // 2}, to gather rows by on sm_100; give every "
            f"page {width} elements per key and head, and no odd ones between pages"
        )
    rows = 1 + sum((n - 1) * stride for n, stride in sizes) // step
    if rows > MOST_ROWS:
        raise InvalidArgument(
            f"kv_cache: spans {rows} steps of {step} elements, must span at most {MOST_ROWS} to "
            "gather rows by on sm_100; use fewer pages, or lay them closer together"
        )
    return step, rows
