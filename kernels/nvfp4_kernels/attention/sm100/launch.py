"""Launches of the attention kernel on sm_100: ``attention`` and ``paged_attention``."""

from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4_kernels.attention.call import AttentionCall, PagedCall
from nvfp4_kernels.attention.merge.merge import MergeArguments
from nvfp4_kernels.attention.merge.sm100 import merge_arguments, merge_segments, scale_arguments
from nvfp4_kernels.attention.scoring import Scoring
from nvfp4_kernels.attention.sm100.choose import AttentionProblem, choose_config
from nvfp4_kernels.attention.sm100.epilogue import AttentionResult
from nvfp4_kernels.attention.sm100.kernel import AttentionArguments, FmhaSm100
from nvfp4_kernels.attention.sm100.operands import Strides
from nvfp4_kernels.attention.sm100.queries import Queries
from nvfp4_kernels.attention.sm100.rotating import RotationArguments
from nvfp4_kernels.attention.sm100.scheduler import SequenceLengths, Sizes
from nvfp4_kernels.attention.sm100.tile import AttentionTile, Layout, Rotation, Variant
from nvfp4_kernels.checks import InvalidArgument, check_rows, strides_of
from nvfp4_kernels.devices import (
    DeviceFacts,
    device_facts,
    dtype_name,
)
from nvfp4_kernels.formats.nvfp4_rows import Nvfp4Rows
from nvfp4_kernels.rotary.store.pages import PagedCache, TokenHeads
from nvfp4_kernels.runtime.compile import launch

MAX_BATCH = 65535  # CTAs along a grid's y dimension
MAX_QUERY_TILES = 65535  # CTAs along a grid's z dimension
NO_MERGE = MergeArguments(None, None, None, None, None, 0, 0, 0, None, None, 0)
_NO_HEADS = TokenHeads(None, 0, 0)
NO_ROTATION = RotationArguments(
    _NO_HEADS, _NO_HEADS, PagedCache(None, 0, 0, 0), None, None, None, None, 0.0, 0
)


@dataclass(frozen=True)
class Rotating:
    """Rotary embedding of queries and new keys in the kernel.

    Attributes:
        rotation: compile-time rotation of the kernel.
        arguments: arguments of the launch.
    """

    rotation: Rotation
    arguments: RotationArguments


@dataclass(frozen=True)
class Merge:
    """Merge of the splits' results by the last CTA of a block of rows.

    Attributes:
        arguments: partial results, and the merged result.
        counters: semaphores, int32 zeros, one per sequence and KV head.
    """

    arguments: MergeArguments
    counters: Tensor


@dataclass(frozen=True)
class KeyValues:
    """Keys and values as the kernel addresses them: ``(pages, heads, rows, D)``, strided.

    Attributes:
        layout: meaning of a page: a sequence of a dense tensor, a whole ragged tensor, or a
            page of the cache.
        k, v: views whose last stride is 1.
        query_start, key_start, seq_lens, block_table, indices: int32, as required by ``layout``.
        k_scale, v_scale: float32, of an E4M3 cache.
        map_stride: elements between rows of the view that TMA gathers read.
        map_rows: number of rows of that view.
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
    map_stride: int = 1
    map_rows: int = 0


@dataclass(frozen=True)
class Inputs:
    """Inputs of a launch.

    Attributes:
        facts: facts of the device.
        q: queries.
        key_values: keys and values.
        sinks: float32 ``(Hq,)`` or None.
        batch: number of sequences; if indexed, of tokens.
        queries: maximum number of queries of a sequence; if indexed, 1.
        keys: maximum number of keys of a sequence; if indexed, of a token's list.
        scoring: scale, soft cap and masks.
        out: contiguous, of ``q``'s dtype and shape, or NVFP4; None: a new tensor.
        counters: semaphores, int32 zeros, one per sequence and KV head; None: splits are always
            merged by another launch.
        rotating: rotary embedding of queries and new keys, for batches whose queries fit in one
            CTA.
    """

    facts: DeviceFacts
    q: Tensor
    key_values: KeyValues
    sinks: Tensor | None
    batch: int
    queries: int
    keys: int
    scoring: Scoring
    out: Tensor | Nvfp4Rows | None = None
    counters: Tensor | None = None
    rotating: Rotating | None = None


def attention(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """See ``nvfp4_kernels.attention.op.attention``.

    Raises:
        InvalidArgument: too many sequences or queries of a sequence, or rows that are not 16-byte
            aligned.
    """
    q, k, v, sinks, query_start, key_start, max_query_len, max_key_len, *_ = call
    if query_start is None or max_query_len is None or max_key_len is None:
        sizes = q.shape[0], q.shape[1], k.shape[1]
        key_values = KeyValues("dense", k.transpose(1, 2), v.transpose(1, 2))
    else:
        sizes = query_start.shape[0] - 1, max_query_len, max_key_len
        one_page = k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)
        key_values = KeyValues("varlen", *one_page, query_start, key_start)
    facts = device_facts(q.device)
    check_rows(facts.arch, k=k, v=v)
    return run(Inputs(facts, q, key_values, sinks, *sizes, call.scoring))


def paged_attention(call: PagedCall, rotating: Rotating | None = None) -> tuple[Tensor, Tensor]:
    """See ``nvfp4_kernels.attention.paged_op.paged_attention``.

    Raises:
        InvalidArgument: an unsupported page size, a D that is not a multiple of 32 with an E4M3
            cache, too many sequences or queries of a sequence, or rows that are not 16-byte
            aligned.
    """
    q, kv_cache = call.q, call.kv_cache
    page_size, head_dim, facts = kv_cache.shape[2], q.shape[-1], device_facts(q.device)
    if page_size < 16 or page_size & (page_size - 1):
        raise InvalidArgument(
            f"kv_cache: page_size is {page_size}, must be a power of two of at least 16 on "
            f"{facts.arch}; set vLLM's block size to 16, 32, 64 or 128"
        )
    check_rows(facts.arch, kv_cache=kv_cache)
    key_values = KeyValues(
        "paged",
        kv_cache[..., :head_dim],
        kv_cache[..., head_dim:],
        query_start=call.query_start,
        seq_lens=call.seq_lens,
        block_table=call.block_table,
        k_scale=call.k_scale,
        v_scale=call.v_scale,
    )
    sizes = len(call.seq_lens), call.max_query_len, call.max_seq_len
    more = call.out, call.counters, rotating
    return run(Inputs(facts, q, key_values, call.sinks, *sizes, call.scoring, *more))


def run(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Choose a tile, allocate the result if ``out`` is None, launch the kernel, merge splits.

    Returns:
        ``out``, or its data if NVFP4, and the LSE.

    Raises:
        InvalidArgument: an unsupported D, too many sequences or queries of a sequence, or
            misaligned rows.
    """
    q, given, sinks, scoring = inputs.q, inputs.key_values, inputs.sinks, inputs.scoring
    batch, counters = inputs.batch, inputs.counters
    *tokens, num_heads, head_dim = q.shape
    facts, fp8 = inputs.facts, given.k.dtype == torch.float8_e4m3fn
    _check_head_dim(head_dim, fp8, facts.arch)
    check_rows(facts.arch, q=q)
    out = q.new_empty(q.shape) if inputs.out is None else inputs.out
    nvfp4, data = (out, out.data) if isinstance(out, Nvfp4Rows) else (None, out)
    check_rows(facts.arch, out=data)
    rows = torch.Size(tokens).numel()
    if rows == 0 or batch == 0 or inputs.queries == 0:
        return data, q.new_empty(q.shape[:-1], dtype=torch.float32)
    if given.k.numel() == 0:
        return _without_keys(q, out, sinks)
    if given.layout != "indexed" and batch > MAX_BATCH:
        raise InvalidArgument(
            f"q: has {batch} sequences, must have at most {MAX_BATCH} on {facts.arch}; split the "
            "batch"
        )
    kv_heads = given.k.shape[1]
    problem = AttentionProblem(
        batch, inputs.queries, inputs.keys, kv_heads, num_heads // kv_heads, head_dim, fp8,
        scoring.window_keys, given.layout == "indexed", scoring.batch_invariant,
    )  # fmt: skip
    tile, splits = choose_config(problem, facts.sms)
    _check_queries(inputs, tile.rows, problem.group)
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    if splits == 1:
        result = AttentionResult(data, lse, sinks, rows, num_heads, **scale_arguments(nvfp4))
        _launch(inputs, problem, tile, splits, result, None)
        return data, lse
    parts = q.new_empty((splits, *q.shape), dtype=torch.float32)
    part_lse = lse.new_empty((splits, *lse.shape))
    # The merge adds the sinks, once.
    result = AttentionResult(parts, part_lse, None, rows, num_heads, **scale_arguments(None))
    if counters is None or problem.queries * problem.group > tile.rows or tile.query_tiles > 1:
        _launch(inputs, problem, tile, splits, result, None)
        return merge_segments(parts, part_lse, sinks, q.dtype, out)
    merge = Merge(merge_arguments(parts, part_lse, sinks, out, lse), counters)
    _launch(inputs, problem, tile, splits, result, merge)
    return data, lse


def _check_queries(inputs: Inputs, rows: int, group: int) -> None:
    """Raise if a sequence has more query tiles of ``rows`` rows than a grid's z dimension."""
    queries, most = inputs.queries, MAX_QUERY_TILES * rows // group
    if queries > most:
        came = f"max_query_len: is {queries}, must be"
        if inputs.key_values.layout == "dense":
            came = f"q: has {queries} queries per sequence, must have"
        raise InvalidArgument(
            f"{came} at most {most} with {group} query heads per KV head on {inputs.facts.arch}; "
            "split the queries"
        )


def _launch(
    inputs: Inputs,
    problem: AttentionProblem,
    tile: AttentionTile,
    splits: int,
    result: AttentionResult,
    merge: Merge | None,
) -> None:
    q, given, scoring, rotating = inputs.q, inputs.key_values, inputs.scoring, inputs.rotating
    pages, kv_heads, page_rows, _ = given.k.shape
    final = result if merge is None else merge.arguments
    variant = Variant(
        dtype=dtype_name(q.dtype),  # type: ignore[arg-type]
        layout=given.layout,
        page_size=page_rows if given.layout in ("paged", "indexed") else 0,
        causal=scoring.causal,
        window=scoring.window is not None,
        soft_cap=scoring.soft_cap is not None,
        sinks=final.sinks is not None,
        split=splits > 1,
        quantized=final.scales is not None,
        merges=merge is not None,
        rotation=None if rotating is None else rotating.rotation,
    )
    table, lists = given.block_table, given.indices
    sequences, keys = problem.batch, page_rows
    if table is not None and lists is not None:
        sequences, keys = len(table), problem.keys
    arguments = AttentionArguments(
        queries=Queries(
            q,
            batch_stride=strides_of(q)[0],
            token_stride=strides_of(q)[-3],
            head_stride=strides_of(q)[-2],
        ),
        k=given.k,
        v=given.v,
        k_strides=_strides(given.k),
        v_strides=_strides(given.v),
        map_stride=given.map_stride,
        map_rows=given.map_rows,
        result=result,
        lengths=SequenceLengths(given.query_start, given.key_start, given.seq_lens),
        block_table=table,
        table_stride=0 if table is None else strides_of(table)[0],
        indices=lists,
        list_stride=0 if lists is None else strides_of(lists)[0],
        scale=scoring.scale,
        soft_cap=scoring.soft_cap or 0.0,
        k_scale=given.k_scale,
        v_scale=given.v_scale,
        merge=NO_MERGE if merge is None else merge.arguments,
        counters=None if merge is None else merge.counters,
        rotation=NO_ROTATION if rotating is None else rotating.arguments,
        sizes=Sizes(
            batch=sequences,
            queries=problem.queries,
            keys=keys,
            pages=pages,
            kv_heads=kv_heads,
            group=problem.group,
            splits=splits,
            window=scoring.window_keys,
            max_resident_ctas=inputs.facts.sms * tile.ctas_per_sm,
        ),
        defective_below=inputs.facts.defective_map_bytes,
    )
    launch(FmhaSm100(tile, variant), arguments)


def _without_keys(
    q: Tensor, out: Tensor | Nvfp4Rows, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Result of a batch without keys, for which no kernel runs: a tensor map cannot be empty."""
    lse = q.new_full(q.shape[:-1], -torch.inf, dtype=torch.float32)
    lse = lse if sinks is None else lse.copy_(sinks)
    if isinstance(out, Nvfp4Rows):
        out.write(torch.zeros_like(q))
        return out.data, lse
    return out.zero_(), lse


def _strides(x: Tensor) -> Strides:
    page, head, row = strides_of(x)[:3]
    return Strides(row=row, head=head, page=page)


def _check_head_dim(head_dim: int, fp8: bool, arch: str) -> None:
    if fp8 and head_dim % 32:
        raise InvalidArgument(
            f"kv_cache: is float8_e4m3fn with D of {head_dim}, must have a D of whole 32 elements "
            f"on {arch}, which its tensor core multiplies at a time; use a cache of q's dtype"
        )
