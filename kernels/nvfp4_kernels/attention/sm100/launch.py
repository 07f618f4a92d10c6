"""``attention`` and ``paged_attention`` on sm_100."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4_kernels.attention.scoring import Scoring
from nvfp4_kernels.attention.sm100.choose import AttentionProblem, choose_config
from nvfp4_kernels.attention.sm100.kernel import FmhaSm100
from nvfp4_kernels.attention.sm100.tile import Dtype, Layout, Variant
from nvfp4_kernels.checks import InvalidArgument, check_rows
from nvfp4_kernels.compile import launch
from nvfp4_kernels.devices import multiprocessors
from nvfp4_kernels.merge_segments.sm100 import merge_segments

MAX_BATCH = 65535  # CTAs of a grid in that direction


@dataclass(frozen=True)
class KeyValues:
    """Keys and values as the kernel addresses them: (pages, heads, rows, D), whatever the strides.

    Attributes:
        layout: what the pages are: of a dense tensor its sequences, of a ragged one all of it.
        k, v: views without a gap between the elements of a row.
        query_start, key_start, seq_lens, block_table, indices: int32, as ``layout`` has them.
        k_scale, v_scale: float32, of an E4M3 cache.
        map_step, map_rows: to gather rows by: elements from one to the next, and how many.
    """

    layout: Layout
    k: Tensor
    v: Tensor
    query_start: Tensor | None = None
    key_start: Tensor | None = None
    seq_lens: Tensor | None = None
    block_table: Tensor | None = None
    indices: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    map_step: int = 1
    map_rows: int = 0


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    query_start: Tensor | None,
    key_start: Tensor | None,
    max_query_len: int | None,
    max_key_len: int | None,
    scoring: Scoring,
) -> tuple[Tensor, Tensor]:
    """See ``nvfp4_kernels.attention.op.attention``.

    Raises:
        InvalidArgument: too many sequences, or strides that are no multiples of 16 bytes.
    """
    if query_start is None or max_query_len is None or max_key_len is None:
        batch, queries, keys = q.shape[0], q.shape[1], k.shape[1]
        given = KeyValues("dense", k.transpose(1, 2), v.transpose(1, 2))
    else:
        batch, queries, keys = query_start.shape[0] - 1, max_query_len, max_key_len
        one_page = k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)
        given = KeyValues("varlen", *one_page, query_start, key_start)
    check_rows("sm_100", k=k, v=v)
    return run(q, given, sinks, batch, queries, keys, scoring)


def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start: Tensor,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    max_query_len: int,
    max_seq_len: int,
    scoring: Scoring,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See ``nvfp4_kernels.attention.op.paged_attention``.

    Raises:
        InvalidArgument: a page size that the kernel lacks, a D that is no multiple of 32 with an
            E4M3 cache, too many sequences, or strides that are no multiples of 16 bytes.
    """
    page_size, head_dim = kv_cache.shape[2], q.shape[-1]
    if page_size < 16 or page_size & (page_size - 1):
        raise InvalidArgument(
            f"kv_cache: page_size is {page_size}, must be a power of two of at least 16 on sm_100; "
            "set vLLM's block size to 16, 32, 64 or 128"
        )
    check_rows("sm_100", kv_cache=kv_cache)
    given = KeyValues(
        "paged",
        kv_cache[..., :head_dim],
        kv_cache[..., head_dim:],
        query_start=query_start,
        seq_lens=seq_lens,
        block_table=block_table,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    return run(q, given, sinks, len(seq_lens), max_query_len, max_seq_len, scoring, out)


def run(
    q: Tensor,
    given: KeyValues,
    sinks: Tensor | None,
    batch: int,
    queries: int,
    keys: int,
    scoring: Scoring,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``batch`` sequences of at most ``queries`` and ``keys``; the result goes to ``out``.

    If indexed, these are the tokens, their one query and the columns of their lists.
    """
    *tokens, heads, head_dim = q.shape
    fp8 = given.k.dtype == torch.float8_e4m3fn
    _check_head_dim(head_dim, fp8)
    check_rows("sm_100", q=q)
    out = q.new_empty(q.shape) if out is None else out
    check_rows("sm_100", out=out)
    rows = torch.Size(tokens).numel()
    if rows == 0 or batch == 0 or queries == 0:
        return out, q.new_empty(q.shape[:-1], dtype=torch.float32)
    if given.k.numel() == 0:
        return _without_keys(out, sinks)
    if given.layout != "indexed" and batch > MAX_BATCH:
        raise InvalidArgument(
            f"q: has {batch} sequences, must have at most {MAX_BATCH} on sm_100; split the batch"
        )
    pages, kv_heads, page_rows, _ = given.k.shape
    problem = AttentionProblem(
        batch, queries, keys, kv_heads, heads // kv_heads, head_dim, fp8, scoring.window_keys,
        given.layout == "indexed",
    )  # fmt: skip
    tile, splits = choose_config(problem, multiprocessors(q.device))
    dtype: Dtype = "bfloat16" if q.dtype == torch.bfloat16 else "float16"
    variant = Variant(
        dtype=dtype,
        layout=given.layout,
        page_size=page_rows if given.layout in ("paged", "indexed") else 0,
        causal=scoring.causal,
        window=scoring.window is not None,
        soft_cap=scoring.soft_cap is not None,
        sinks=sinks is not None and splits == 1,
        split=splits > 1,
    )
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    parts, part_lse = out, lse
    if splits > 1:
        parts = q.new_empty((splits, *q.shape), dtype=torch.float32)
        part_lse = lse.new_empty((splits, *lse.shape))
    table, lists = given.block_table, given.indices
    sequences, columns = batch, page_rows
    if table is not None and lists is not None:
        sequences, columns = len(table), keys
    launch(
        FmhaSm100(tile, variant), q, given.k, given.v, parts, part_lse,
        sinks if variant.sinks else None, given.query_start, given.key_start, given.seq_lens,
        table, lists, given.k_scale, given.v_scale, q.stride(0), q.stride(-3), q.stride(-2),
        *_strides(given.k), *_strides(given.v), given.map_step,
        scoring.scale, scoring.soft_cap or 0.0,
        sequences, queries, columns, pages, kv_heads, heads // kv_heads, splits,
        scoring.window_keys, 0 if table is None else table.stride(0), rows,
        0 if lists is None else lists.stride(0), given.map_rows,
    )  # fmt: skip
    if splits > 1:
        return merge_segments(parts, part_lse, sinks, q.dtype, out)
    return out, lse


def _without_keys(out: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """What a row without keys gets, in all rows: a tensor map of no memory cannot be made."""
    lse = out.new_full(out.shape[:-1], -torch.inf, dtype=torch.float32)
    return out.zero_(), lse if sinks is None else lse.copy_(sinks)


def _strides(x: Tensor) -> tuple[int, int, int]:
    """Of rows, heads and pages."""
    pages, heads, rows = x.stride()[:3]
    return rows, heads, pages


def _check_head_dim(head_dim: int, fp8: bool) -> None:
    if fp8 and head_dim % 32:
        raise InvalidArgument(
            f"kv_cache: is float8_e4m3fn with D of {head_dim}, must have a D of whole 32 elements "
            "on sm_100, which its tensor core multiplies at a time; use a cache of q's dtype"
        )
