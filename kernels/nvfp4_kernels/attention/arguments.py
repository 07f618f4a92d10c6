"""Argument checks of ``attention`` and ``paged_attention``, some shared with other ops."""

import itertools
import math

import torch
from torch import Tensor

from nvfp4_kernels.attention.call import AttentionCall, PagedCall
from nvfp4_kernels.attention.scoring import Scoring
from nvfp4_kernels.checks import (
    InvalidArgument,
    check_dtype,
    check_same_device,
    check_shape,
    reads_contents,
)
from nvfp4_kernels.dispatch import Mode
from nvfp4_kernels.formats.output import Static, check_static, refuse_output
from nvfp4_kernels.heads import check_cache, check_form, check_heads, check_queries


def check_output(output: Static | None, out: object, first_row: int) -> None:
    """Raise unless ``output``, ``out`` and ``first_row`` fit together.

    Raises:
        InvalidArgument: ``output`` is neither None nor a valid ``Static`` of one term; or it is
            None, and ``out`` is a pair of tensors or ``first_row`` is not 0.
    """
    if output is None:
        if isinstance(out, tuple):
            raise InvalidArgument(
                "out: is a pair of tensors, must be one tensor for a result of q's dtype; for "
                "NVFP4 pass output=Static(global_scale)"
            )
        if first_row:
            raise InvalidArgument(
                f"first_row: is {first_row}, must be 0 for a result of q's dtype; leave it out, or "
                "pass output=Static(global_scale)"
            )
        return
    if not isinstance(output, Static):
        raise refuse_output(output, "None or Static(global_scale)")
    if not isinstance(output.global_scale, Tensor):
        check_static(output)
    if output.terms != 1:
        raise InvalidArgument(
            f"output.terms: is {output.terms}, must be 1; quantize() the 16-bit result for more"
        )


def check_attention(call: AttentionCall) -> None:
    """Check the arguments of ``attention``."""
    lengths = call.query_start, call.key_start, call.max_query_len, call.max_key_len
    if any(given is not None for given in lengths):
        _check_varlen(call)
    else:
        _check_dense(call)


def _check_dense(call: AttentionCall) -> None:
    q, k, v, sinks, *_ = call
    check_queries(q, "(B, Tq, Hq, D)")
    _check_keys(q, k, v, "(B, Tk, Hkv, D)")
    if k.shape[0] != q.shape[0]:
        raise InvalidArgument(f"k: B is {k.shape[0]}, must be {q.shape[0]} as q's; expand() it")
    check_sinks(sinks, q)
    check_scoring(call.scoring)
    check_same_device(q=q, k=k, v=v, sinks=sinks)


def _check_varlen(call: AttentionCall) -> None:
    q, k, v, sinks, query_start, key_start, max_query_len, max_key_len, *_ = call
    if query_start is None or key_start is None or max_query_len is None or max_key_len is None:
        lengths = {
            "query_start": query_start,
            "key_start": key_start,
            "max_query_len": max_query_len,
            "max_key_len": max_key_len,
        }
        missing = next(name for name, given in lengths.items() if given is None)
        given = next(name for name, given in lengths.items() if given is not None)
        raise InvalidArgument(
            f"{missing}: is missing, must be given as {given} is; ragged sequences need "
            "query_start, key_start, max_query_len and max_key_len"
        )
    check_queries(q, "(total_q, Hq, D)")
    _check_keys(q, k, v, "(total_k, Hkv, D)")
    check_sinks(sinks, q)
    check_scoring(call.scoring)
    check_indices("query_start", query_start, 1)
    check_indices("key_start", key_start, 1)
    check_start_shape(query_start)
    check_shape("key_start", key_start, query_start.shape, "one start per sequence, and the end")
    _check_length("max_query_len", max_query_len)
    _check_length("max_key_len", max_key_len)
    check_same_device(q=q, k=k, v=v, sinks=sinks, query_start=query_start, key_start=key_start)
    if reads_contents(q):
        check_starts("query_start", query_start, len(q))
        _check_longest("max_query_len", max_query_len, "query_start", query_start)
        check_starts("key_start", key_start, len(k))
        _check_longest("max_key_len", max_key_len, "key_start", key_start)


def check_paged(call: PagedCall) -> Mode:
    """Check the arguments of ``paged_attention`` except ``out``; return the dispatch mode."""
    q, kv_cache, block_table, seq_lens, query_start, sinks, k_scale, v_scale, *_ = call
    check_queries(q, "(T, Hq, D)")
    mode = check_cache(q, kv_cache, k_scale, v_scale)
    check_sinks(sinks, q)
    check_scoring(call.scoring)
    check_indices("query_start", query_start, 1)
    check_start_shape(query_start)
    sequences = query_start.shape[0] - 1
    check_indices("seq_lens", seq_lens, 1)
    check_shape("seq_lens", seq_lens, (sequences,), "one length per sequence of query_start")
    check_indices("block_table", block_table, 2)
    expected = (sequences, block_table.shape[1])
    check_shape("block_table", block_table, expected, "one row per sequence of query_start")
    _check_length("max_query_len", call.max_query_len)
    _check_length("max_seq_len", call.max_seq_len)
    check_same_device(
        q=q, kv_cache=kv_cache, block_table=block_table, seq_lens=seq_lens,
        query_start=query_start, sinks=sinks, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    if reads_contents(q):
        check_starts("query_start", query_start, len(q))
        _check_longest("max_query_len", call.max_query_len, "query_start", query_start)
        _check_lengths(seq_lens, block_table.shape[1] * kv_cache.shape[2], call.max_seq_len)
        used = block_table[:, : -(-call.max_seq_len // kv_cache.shape[2])]
        _check_pages(kv_cache, used, seq_lens, query_start, call.window)
    _check_counters(call)
    return mode


def _check_counters(call: PagedCall) -> None:
    """Raise unless ``counters`` is None or has an element per pair of sequence and KV head."""
    counters = call.counters
    if counters is None:
        return
    least = len(call.seq_lens) * call.kv_cache.shape[1]
    check_indices("counters", counters, 1)
    if len(counters) < least:
        raise InvalidArgument(
            f"counters: has {len(counters)} elements, must have at least {least}, one for each "
            "sequence and KV head; allocate more zeros"
        )
    check_same_device(q=call.q, counters=counters)


def _check_keys(q: Tensor, k: Tensor, v: Tensor, form: str) -> None:
    for name, x in (("k", k), ("v", v)):
        check_dtype(name, x, (q.dtype,))
        check_form(name, x, form)
        if x.shape[-1] != q.shape[-1]:
            raise InvalidArgument(
                f"{name}: D is {x.shape[-1]}, must be {q.shape[-1]} as q's; pad it with zeros"
            )
    check_shape("v", v, k.shape, "one value per key")
    check_heads("k", q.shape[-2], k.shape[-2])


def check_sinks(sinks: Tensor | None, q: Tensor) -> None:
    """Raise unless ``sinks`` is None or has one sink per head of ``q``."""
    if sinks is not None:
        check_dtype("sinks", sinks, (torch.float32,))
        check_shape("sinks", sinks, (q.shape[-2],), "one logit per head of q")
        if not sinks.is_contiguous():
            raise InvalidArgument(
                f"sinks: stride is {sinks.stride(0)}, must be 1; call contiguous() on it"
            )


def check_scoring(scoring: Scoring) -> None:
    """Raise unless scale, soft cap and window are in range."""
    if not (math.isfinite(scoring.scale) and scoring.scale > 0):
        raise InvalidArgument(
            f"scale: is {scoring.scale}, must be positive and finite; D ** -0.5 is usual"
        )
    cap = scoring.soft_cap
    if cap is not None and not (math.isfinite(cap) and cap > 0):
        raise InvalidArgument(
            f"soft_cap: is {cap}, must be positive and finite; pass None for no cap"
        )
    if scoring.window is None:
        return
    if scoring.window < 1:
        raise InvalidArgument(
            f"window: is {scoring.window}, must be 1 or more keys, the query's own included; "
            "pass None for no window"
        )
    if not scoring.causal:
        raise InvalidArgument(
            "window: is given without causal, must go with it: a window ends at the query; "
            "pass causal=True"
        )


def check_indices(name: str, x: Tensor, dims: int) -> None:
    """Raise unless ``x`` is int32, of ``dims`` dimensions, the last of stride 1."""
    check_dtype(name, x, (torch.int32,))
    if x.ndim != dims:
        raise InvalidArgument(
            f"{name}: shape is {tuple(x.shape)}, must have {dims} dimension(s); reshape it"
        )
    if x.numel() and x.stride(-1) != 1 and x.shape[-1] != 1:
        raise InvalidArgument(
            f"{name}: strides are {x.stride()}, the last must be 1; call contiguous() on it"
        )


def check_start_shape(query_start: Tensor) -> None:
    """Raise if ``query_start`` is empty: B + 1 elements are required, one if B is 0."""
    if query_start.shape[0] == 0:
        raise InvalidArgument(
            "query_start: is empty, must hold B + 1 starts; for no sequence pass one 0"
        )


def _check_length(name: str, length: int) -> None:
    if length < 0:
        raise InvalidArgument(f"{name}: is {length}, must be 0 or more; pass the longest's length")


def check_starts(name: str, given: Tensor, rows: int) -> None:
    """Raise unless starts ``given`` begin with 0, never decrease, and end with at most ``rows``."""
    starts = given.tolist()
    if starts[0] != 0:
        raise InvalidArgument(f"{name}: begins with {starts[0]}, must begin with 0; prepend it")
    lengths = [after - before for before, after in itertools.pairwise(starts)]
    if min(lengths, default=0) < 0:
        raise InvalidArgument(f"{name}: falls at {lengths.index(min(lengths))}, must not; cumsum()")
    if starts[-1] > rows:
        raise InvalidArgument(
            f"{name}: ends with {starts[-1]}, must be at most {rows}, the rows there are"
        )


def _check_longest(limit: str, longest: int, name: str, starts: Tensor) -> None:
    needed = max(starts.diff().tolist(), default=0)
    if needed > longest:
        raise InvalidArgument(
            f"{limit}: is {longest}, must be at least {needed}, the longest in {name}"
        )


def _check_lengths(seq_lens: Tensor, room: int, longest: int) -> None:
    """Raise unless every length is from 0 to ``room`` and at most ``longest``.

    ``room`` is the number of keys that a row of block_table holds, ``longest`` is max_seq_len.
    """
    for sequence, length in enumerate(seq_lens.tolist()):
        if not 0 <= length <= room:
            raise InvalidArgument(
                f"seq_lens: is {length} for sequence {sequence}, must be from 0 to {room}, what a "
                "row of block_table holds; widen block_table"
            )
        if length > longest:
            raise InvalidArgument(
                f"max_seq_len: is {longest}, must be at least {length}, the longest in seq_lens"
            )


def _check_pages(
    kv_cache: Tensor, block_table: Tensor, seq_lens: Tensor, query_start: Tensor, window: int | None
) -> None:
    """Raise unless ``block_table`` has pages of the cache for all keys that some query sees."""
    size = kv_cache.shape[2]
    first_keys = torch.arange(block_table.shape[1]) * size
    needed = first_keys < seq_lens.unsqueeze(1)
    if window is not None:
        oldest = seq_lens - query_start.diff() - window + 1
        needed &= first_keys + size > oldest.unsqueeze(1)
    needed &= query_start.diff().unsqueeze(1) > 0
    wrong = block_table[needed & ((block_table < 0) | (block_table >= len(kv_cache)))]
    if wrong.numel():
        raise InvalidArgument(
            f"block_table: holds page {wrong[0]}, must be from 0 to {len(kv_cache) - 1}, the pages "
            "of kv_cache; check the sequence's pages"
        )
