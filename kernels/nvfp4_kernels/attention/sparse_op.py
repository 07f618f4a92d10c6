"""``sparse_attention``: attention of each token to listed (e.g. top-k) keys."""

from typing import Any

import torch
from torch import Tensor

from nvfp4_kernels.attention.call import SparseCall
from nvfp4_kernels.attention.kernels import SPARSE_KERNELS
from nvfp4_kernels.attention.op import new_result
from nvfp4_kernels.attention.sparse_arguments import check_sparse
from nvfp4_kernels.dispatch import called
from nvfp4_kernels.heads import check_out

_ARGUMENTS = (
    "Tensor q, Tensor kv_cache, Tensor indices, Tensor lens, Tensor block_table, "
    "Tensor query_start, Tensor? sinks, Tensor? k_scale, Tensor? v_scale, float? scale, "
    "float? soft_cap"
)


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
    """Attention of each token to listed (e.g. top-k) keys of the token's sequence in a paged cache.

    All heads of a token share one list, which is the only mask: listed keys are attended to even if
    they come after the token's position, and a key listed twice counts twice. The order of a list
    does not matter. Unlisted keys, and entries of ``block_table`` for pages without a listed key,
    are not read and may hold anything.

    The result can be a segment of ``merge_segments``. Segments must be disjoint: to merge with
    ``paged_attention`` over a window, the lists must not contain keys within the window, or such
    keys count twice. Sinks may be passed to only one segment's op, or to the merge.

    The call does not synchronise with the device, and only the result depends on the contents of
    index tensors: a CUDA graph may capture it.

    Args:
        q: see ``paged_attention``.
        kv_cache: see ``paged_attention``; but on sm_100 ``page_size`` is free, and the strides of
            pages, heads and rows are multiples of one stride of at least D elements.
        indices: int32 ``(T, k)``: positions of keys in the row's sequence, as
            ``indexer_score_topk`` returns them; a row's entries after the first ``lens`` may hold
            anything. The last stride is 1.
        lens: int32 ``(T,)``, from 0 to k: number of valid entries of each row, the second result of
            ``indexer_score_topk``. Without entries, ``out`` is 0 and ``lse`` −inf or the sink.
        block_table: int32 ``(B, P)``: page ``block_table[b, i]`` holds keys ``i · page_size`` on of
            sequence b.
        query_start: int32 ``(B + 1,)``: rows ``query_start[b]`` up to, not including,
            ``query_start[b + 1]`` belong to sequence b; results of rows after the last sequence's
            are undefined.
        scale: factor of ``q · k``; None: ``D ** -0.5``.
        soft_cap: logits become ``soft_cap · tanh(logit / soft_cap)``.
        sinks: float32 ``(Hq,)``, a logit per head that adds to the softmax's sum and has no value.
        k_scale: float32 ``()``, with a float8_e4m3fn cache: factor that dequantises stored keys.
        v_scale: float32 ``()``, if ``k_scale`` is given: factor that dequantises stored values.
        out: contiguous, of ``q``'s dtype and shape, written; None: a new tensor.

    Returns:
        ``out`` of ``q``'s dtype and shape, and ``lse`` float32 ``(T, Hq)``: the natural logarithm
        of the sum of the exponentials of a row's logits and sink. On sm_100, with a float8_e4m3fn
        cache, more than 128 query heads per KV head and D of at most 128, ``lse`` is off by up to
        1.02e-4, see ``paged_attention``.

    Raises:
        InvalidArgument: an unsupported or inconsistent argument; the message names it. The
            contents of tensors are checked on CPU only.
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


@torch.library.custom_op(
    "nvfp4::sparse_attention", mutates_args=(), schema=f"({_ARGUMENTS}) -> (Tensor, Tensor)"
)
def _sparse_attention(*arguments: Any) -> tuple[Tensor, Tensor]:
    return _run(SparseCall(*arguments))


@_sparse_attention.register_fake
def _(q: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return new_result(q)


@torch.library.custom_op(
    "nvfp4::sparse_attention_into",
    mutates_args=("out",),
    schema=f"(Tensor(a!) out, {_ARGUMENTS}) -> Tensor",
)
def _sparse_attention_into(out: Tensor, *arguments: Any) -> Tensor:
    return _run(SparseCall._make((*arguments, out)))[1]


@_sparse_attention_into.register_fake
def _(out: Tensor, q: Tensor, *rest: object) -> Tensor:
    return new_result(q)[1]


def _run(call: SparseCall) -> tuple[Tensor, Tensor]:
    mode = check_sparse(call)
    return SPARSE_KERNELS.select(call.q.device, mode).load()(call)
