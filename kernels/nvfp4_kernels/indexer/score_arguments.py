"""Argument checks of the ops that score keys, contiguous or paged, or select the top-k."""

import torch
from torch import Tensor

from nvfp4_kernels.checks import (
    InvalidArgument,
    check_dtype,
    check_same_device,
    check_shape,
    reads_contents,
)
from nvfp4_kernels.indexer.arguments import (
    check_block_table,
    check_cache,
    check_contiguous,
    check_count,
    check_form,
    check_indices,
    check_pages,
    check_stored,
)
from nvfp4_kernels.indexer.call import IndexerKeys, IndexerPagedKeys, ScoreCall
from nvfp4_kernels.indexer.formats import Format


def check_scored(call: ScoreCall) -> None:
    """Raise unless ``indexer_logits`` or ``indexer_score_topk`` can take the arguments.

    Page numbers of queries that see at most ``top_k`` keys are not checked.
    """
    if isinstance(call.keys, IndexerPagedKeys):
        _check_paged(call, call.keys)
    else:
        _check_contiguous(call, call.keys)


def _check_contiguous(call: ScoreCall, keys: IndexerKeys) -> None:
    q, q_scales, weights, fmt = call.q, call.q_scales, call.weights, call.fmt
    k, k_scales, ks, ke = keys
    head_dim = _check_queries(fmt, q, q_scales, "(T, H, D)")
    key_dim = check_stored(fmt, "k", k, k_scales, "(Tk, D)")
    if key_dim != head_dim:
        raise InvalidArgument(f"k: D is {key_dim}, must be {head_dim} as q's; pad it with zeros")
    tokens, heads = q.shape[:2]
    _check_weights(weights, (tokens, heads))
    check_indices("ks", ks, (tokens,), "the first key of each query")
    check_indices("ke", ke, (tokens,), "the key after the last of each query")
    check_same_device(q=q, q_scales=q_scales, k=k, k_scales=k_scales, weights=weights, ks=ks, ke=ke)
    if reads_contents(q):
        _check_range(ks, ke, len(k))


def _check_paged(call: ScoreCall, keys: IndexerPagedKeys) -> None:
    q, q_scales, weights = call.q, call.q_scales, call.weights
    cache, context_lens, block_table, max_context_len, block_size = keys
    head_dim = _check_queries(call.fmt, q, q_scales, "(B, next_n, H, D)")
    check_cache(cache, call.fmt, head_dim, block_size)
    batch, next_n, heads = q.shape[:3]
    _check_weights(weights, (batch * next_n, heads))
    check_indices("context_lens", context_lens, (batch, next_n), "one length per query")
    check_block_table(block_table, batch)
    check_count("max_context_len", max_context_len, "pass the longest context's length")
    check_same_device(
        q=q, q_scales=q_scales, cache=cache, weights=weights,
        context_lens=context_lens, block_table=block_table,
    )  # fmt: skip
    if reads_contents(q) and context_lens.numel():
        _check_lengths("context_lens", context_lens.flatten(), max_context_len)
        scored = context_lens.where(context_lens >= call.min_keys, 0).amax(1)
        check_pages(cache, block_table, block_size, scored)


def check_logits(logits: Tensor, lens: Tensor, starts: Tensor | None) -> None:
    """Raise unless ``indexer_topk`` can take rows of scores."""
    check_dtype("logits", logits, (torch.float32,))
    check_form("logits", logits, "(rows, columns)")
    if logits.numel() and logits.stride(1) != 1:
        raise InvalidArgument(
            f"logits: strides are {logits.stride()}, the last must be 1; call contiguous() on it"
        )
    rows, columns = logits.shape
    check_indices("lens", lens, (rows,), "one length per row of logits")
    if starts is not None:
        check_indices("starts", starts, (rows,), "one start per row of logits")
    check_same_device(logits=logits, lens=lens, starts=starts)
    if reads_contents(logits):
        if starts is None:
            _check_lengths("lens", lens, columns, "the columns of logits")
        else:
            _check_windows(lens, starts, columns)


def _check_queries(fmt: Format, q: Tensor, q_scales: Tensor | None, form: str) -> int:
    """Raise unless queries have ``fmt``'s dtypes and shapes, as by ``check_stored``; return D."""
    # FP8's scales, one per head, may have been multiplied into the weights.
    return check_stored(fmt, "q", q, q_scales, form, optional=fmt.name == "fp8")


def _check_weights(weights: Tensor, shape: tuple[int, int]) -> None:
    """Raise unless ``weights`` is contiguous float32 of ``shape``, (queries, heads)."""
    check_dtype("weights", weights, (torch.float32,))
    check_shape("weights", weights, shape, "one weight per query and head")
    check_contiguous("weights", weights)


def _check_range(ks: Tensor, ke: Tensor, keys: int) -> None:
    """Raise unless ``0 <= ks <= ke <= keys`` for each query."""
    outside = (ks < 0) | (ks > keys)
    if outside.any():
        row = int(outside.int().argmax())
        raise InvalidArgument(
            f"ks: is {int(ks[row])} for query {row}, must be from 0 to {keys}, the keys there are"
        )
    outside = (ke < ks) | (ke > keys)
    if outside.any():
        row = int(outside.int().argmax())
        raise InvalidArgument(
            f"ke: is {int(ke[row])} for query {row}, must be from {int(ks[row])}, its ks, to "
            f"{keys}, the keys there are"
        )


def _check_windows(lens: Tensor, starts: Tensor, columns: int) -> None:
    """Raise unless each row of logits has ``lens`` columns from ``starts`` on."""
    _check_lengths("starts", starts, columns, "the columns of logits")
    outside = (lens < 0) | (lens > columns - starts)
    if outside.any():
        row = int(outside.int().argmax())
        raise InvalidArgument(
            f"lens: is {int(lens[row])} for row {row}, must be from 0 to "
            f"{columns - int(starts[row])}, the columns of logits from {int(starts[row])} on"
        )


def _check_lengths(name: str, lengths: Tensor, limit: int, what: str = "max_context_len") -> None:
    """Raise unless ``lengths`` are from 0 to ``limit``, which the error describes as ``what``."""
    outside = (lengths < 0) | (lengths > limit)
    if outside.any():
        row = int(outside.int().argmax())
        raise InvalidArgument(
            f"{name}: is {int(lengths[row])} for row {row}, must be from 0 to {limit}, {what}"
        )
