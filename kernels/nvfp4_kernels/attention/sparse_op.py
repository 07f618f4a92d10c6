"""``sparse_attention``: attention of each token to the keys on its list."""

from typing import Any

import torch
from torch import Tensor

from nvfp4_kernels.attention.kernels import SPARSE_KERNELS
from nvfp4_kernels.attention.op import new_result, scoring_of
from nvfp4_kernels.attention.sparse_arguments import check_sparse
from nvfp4_kernels.dispatch import called
from nvfp4_kernels.heads import check_out


def sparse_attention(
    q: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
    lens: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of each token to chosen keys of its sequence, in a paged cache.

    All heads of a token share its list, which is the only mask: what lies after the token, or in a
    window, is attended to if it is listed, and what is listed twice counts twice. The keys of a
    list may come in any order. Keys that no list has are not read, nor are entries of
    ``block_table`` for pages without a listed key, which may hold anything.

    The result is that of one segment, for ``merge_segments``. Segments must be disjoint: before the
    result is merged with that of ``paged_attention`` with a window, keys within the window must be
    off the lists, or they count twice. Only one of the segments, or the merge, may have the sinks.

    The call does not synchronise with the device, and only the result depends on the contents of
    index tensors: a CUDA graph may capture it.

    Args:
        q: see ``paged_attention``.
        kv_cache: see there; on sm_100 of any ``page_size``, and the strides of its pages, heads and
            rows are multiples of one stride of at least D elements.
        indices: int32 ``(T, k)``: positions of keys in the row's sequence, as
            ``indexer_score_topk_paged`` returns them; entries after the first ``lens`` of a row may
            hold anything. The last dimension must not have gaps.
        lens: int32 ``(T,)``, from 0 to k: how many entries of each row are valid, that op's second
            result. A row without any gives 0 and −inf, or its sink.
        block_table: int32 ``(B, P)``: page ``block_table[b, i]`` holds keys ``i · page_size`` on of
            sequence b.
        query_start: int32 ``(B + 1,)``: rows ``query_start[b]`` up to, not including,
            ``query_start[b + 1]`` belong to sequence b; results of rows after the last sequence's
            are undefined.
        scale: factor of ``q · k``; None: ``D ** -0.5``.
        soft_cap: logits become ``soft_cap · tanh(logit / soft_cap)``.
        sinks: float32 ``(Hq,)``, a logit per head that adds to the softmax's sum and has no value.
        k_scale: float32 ``()``, with a float8_e4m3fn cache: a key is what is stored times this.
        v_scale: the same for values.
        out: contiguous, of ``q``'s dtype and shape, written; None: a new tensor.

    Returns:
        ``out`` of ``q``'s dtype and shape, and ``lse`` float32 ``(T, Hq)``: the natural logarithm
        of the sum of the exponentials of a row's logits, its sink among them. With a float8_e4m3fn
        cache and more than 128 query heads to a KV head it is off by up to 1.02e-4 on sm_100, as
        ``paged_attention`` says of as many rows.

    Raises:
        InvalidArgument: an argument that does not fit, named. The contents of tensors are
            checked on CPU only.
        NoKernelError: no kernel for this device.
    """
    arguments = (
        q, kv_cache, indices, lens, block_table, query_start, sinks, k_scale, v_scale,
        scale, soft_cap,
    )  # fmt: skip
    if out is None:
        return called(_sparse_attention, q)(*arguments)
    check_out(out, q)
    return out, called(_sparse_attention_into, q)(out, *arguments)


@torch.library.custom_op("nvfp4::sparse_attention", mutates_args=())
def _sparse_attention(
    q: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
    lens: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    scale: float | None,
    soft_cap: float | None,
) -> tuple[Tensor, Tensor]:
    tensors = q, kv_cache, indices, lens, block_table, query_start, sinks, k_scale, v_scale
    return _sparse(None, *tensors, scoring_of(q, scale, False, None, soft_cap))


@_sparse_attention.register_fake
def _(q: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return new_result(q)


@torch.library.custom_op("nvfp4::sparse_attention_into", mutates_args=("out",))
def _sparse_attention_into(
    out: Tensor,
    q: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
    lens: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    scale: float | None,
    soft_cap: float | None,
) -> Tensor:
    tensors = q, kv_cache, indices, lens, block_table, query_start, sinks, k_scale, v_scale
    return _sparse(out, *tensors, scoring_of(q, scale, False, None, soft_cap))[1]


@_sparse_attention_into.register_fake
def _(out: Tensor, q: Tensor, *rest: object) -> Tensor:
    return new_result(q)[1]


def _sparse(out: Tensor | None, q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    mode = check_sparse(q, *rest)
    kernel = SPARSE_KERNELS.select(q.device, mode).load()
    return kernel(q, *rest, out)
