"""Ops for the top-k keys of sparse attention: ``indexer_topk``, ``indexer_score_topk``.

All of them return ``indices`` int32 ``(rows, top_k)`` and ``valid`` int32 ``(rows,)``. Row r begins
with ``valid[r] = min(top_k, keys of the row)`` distinct keys in ascending order, counted from the
row's first visible key, then −1. The keys have the highest scores; ties go to the first key. NaN
counts as −inf, +inf is the highest, and −0 equals +0.

The order is ascending because attention accepts any order with −1 at the end, but reads memory best
in ascending order, and because a row that sees at most ``top_k`` keys is then 0, 1, 2, … for any
scores, which need not be computed. Keys are counted from the row's first key, as in vLLM.
"""

import torch
from torch import Tensor

from nvfp4_kernels.indexer.arguments import check_top_k
from nvfp4_kernels.indexer.formats import format_of
from nvfp4_kernels.indexer.kernels import (
    SCORE_TOPK_KERNELS,
    SCORE_TOPK_PAGED_KERNELS,
    TOPK_KERNELS,
)
from nvfp4_kernels.indexer.score_arguments import check_logits, check_scored, check_scored_paged


def indexer_topk(
    logits: Tensor, lens: Tensor, top_k: int, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Keys of the highest scores of each row, exact and deterministic.

    Args:
        logits: float32 ``(rows, columns)``, the last stride 1. Columns that a row does not see may
            hold anything.
        lens: int32 ``(rows,)``, the keys that each row sees.
        top_k: keys to select, 1 to 4096; may exceed the number of columns.
        starts: int32 ``(rows,)``: row r sees columns ``starts[r] <= c < starts[r] + lens[r]``;
            None: from 0 on.

    Returns:
        ``indices`` and ``valid``; see the module.

    Raises:
        InvalidArgument: an argument that does not fit, named. The contents of tensors are
            checked on CPU only.
        NoKernelError: no kernel for this device.
    """
    return torch.ops.nvfp4.indexer_topk(logits, lens, top_k, starts)


def indexer_score_topk(
    q: Tensor,
    q_scales: Tensor | None,
    k: Tensor,
    k_scales: Tensor | None,
    weights: Tensor,
    ks: Tensor,
    ke: Tensor,
    top_k: int,
    fmt: str,
) -> tuple[Tensor, Tensor]:
    """Fused ``indexer_logits`` and ``indexer_topk``; the logits are not stored.

    Keys are not read for queries that see at most ``top_k`` keys. On sm_100 candidates share shared
    memory with queries and keys, so that two cases are refused: ``top_k`` ≥ 2433 with over 112
    heads of 256 in bf16, and ``top_k`` ≥ 3457 with over 96 heads.

    Args:
        q: ``(T, H, D)`` in ``fmt``; see ``indexer_logits`` for all arguments but ``top_k``.
        q_scales: scales of ``q``, or None.
        k: ``(Tk, D)`` in ``fmt``.
        k_scales: scales of ``k``; None for bf16.
        weights: float32 ``(T, H)``.
        ks: int32 ``(T,)``, first key that each query sees.
        ke: int32 ``(T,)``, key after the last.
        top_k: keys to select, 1 to 4096.
        fmt: ``"nvfp4"``, ``"mxfp4"``, ``"fp8"`` or ``"bf16"``.

    Returns:
        ``indices`` and ``valid``, indices counted from ``ks``; see the module.

    Raises:
        InvalidArgument, NoKernelError: as ``indexer_logits``.
    """
    return torch.ops.nvfp4.indexer_score_topk(q, q_scales, k, k_scales, weights, ks, ke, top_k, fmt)


def indexer_score_topk_paged(
    q: Tensor,
    q_scales: Tensor | None,
    cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    max_context_len: int,
    top_k: int,
    fmt: str,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """Fused ``indexer_logits_paged`` and ``indexer_topk``; the logits are not stored.

    Neither keys nor pages are read for queries that see at most ``top_k`` keys. A CUDA graph may
    capture the call. On sm_100 the limits of ``indexer_score_topk`` apply.

    Args:
        q: ``(B, next_n, H, D)`` in ``fmt``; see ``indexer_logits_paged`` for all arguments but
            ``top_k``.
        q_scales: scales of ``q``, or None.
        cache: uint8 ``(pages, page_bytes)``.
        weights: float32 ``(B · next_n, H)``.
        context_lens: int32 ``(B, next_n)``, keys that each query sees.
        block_table: int32 ``(B, P)``, pages of each sequence.
        max_context_len: upper bound on the contexts.
        top_k: keys to select, 1 to 4096.
        fmt: ``"nvfp4"``, ``"mxfp4"``, ``"fp8"`` or ``"bf16"``.
        block_size: keys of a page.

    Returns:
        ``indices`` and ``valid`` of ``B · next_n`` rows; see the module.

    Raises:
        InvalidArgument, NoKernelError: as ``indexer_logits``.
    """
    return torch.ops.nvfp4.indexer_score_topk_paged(
        q, q_scales, cache, weights, context_lens, block_table, max_context_len, top_k, fmt,
        block_size,
    )  # fmt: skip


@torch.library.custom_op("nvfp4::indexer_topk", mutates_args=())
def _topk(logits: Tensor, lens: Tensor, top_k: int, starts: Tensor | None) -> tuple[Tensor, Tensor]:
    """Check the arguments of ``indexer_topk``, and run its kernel."""
    check_top_k(top_k)
    check_logits(logits, lens, starts)
    kernel = TOPK_KERNELS.select(logits.device, "float").load()
    return kernel(logits, lens, top_k, starts)


@_topk.register_fake
def _(logits: Tensor, lens: Tensor, top_k: int, starts: Tensor | None) -> tuple[Tensor, Tensor]:
    return _new_result(logits, logits.shape[0], top_k)


@torch.library.custom_op("nvfp4::indexer_score_topk", mutates_args=())
def _score_topk(
    q: Tensor,
    q_scales: Tensor | None,
    k: Tensor,
    k_scales: Tensor | None,
    weights: Tensor,
    ks: Tensor,
    ke: Tensor,
    top_k: int,
    fmt: str,
) -> tuple[Tensor, Tensor]:
    """Check the arguments of ``indexer_score_topk``, and run its kernel."""
    known = format_of(fmt)
    check_top_k(top_k)
    tensors = q, q_scales, k, k_scales, weights, ks, ke
    check_scored(*tensors, known)
    kernel = SCORE_TOPK_KERNELS.select(q.device, known.name).load()
    return kernel(*tensors, top_k, known)


@_score_topk.register_fake
def _(
    q: Tensor,
    q_scales: Tensor | None,
    k: Tensor,
    k_scales: Tensor | None,
    weights: Tensor,
    ks: Tensor,
    ke: Tensor,
    top_k: int,
    fmt: str,
) -> tuple[Tensor, Tensor]:
    return _new_result(q, q.shape[0], top_k)


@torch.library.custom_op("nvfp4::indexer_score_topk_paged", mutates_args=())
def _score_topk_paged(
    q: Tensor,
    q_scales: Tensor | None,
    cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    max_context_len: int,
    top_k: int,
    fmt: str,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """Check the arguments of ``indexer_score_topk_paged``, and run its kernel."""
    known = format_of(fmt)
    check_top_k(top_k)
    tensors = q, q_scales, cache, weights, context_lens, block_table
    check_scored_paged(*tensors, max_context_len, known, block_size, min_keys=top_k + 1)
    kernel = SCORE_TOPK_PAGED_KERNELS.select(q.device, known.name).load()
    return kernel(*tensors, max_context_len, top_k, known, block_size)


@_score_topk_paged.register_fake
def _(
    q: Tensor,
    q_scales: Tensor | None,
    cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    max_context_len: int,
    top_k: int,
    fmt: str,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    return _new_result(q, q.shape[0] * q.shape[1], top_k)


def _new_result(like: Tensor, rows: int, top_k: int) -> tuple[Tensor, Tensor]:
    """Unwritten ``indices`` and ``valid``."""
    indices = like.new_empty((rows, top_k), dtype=torch.int32)
    return indices, like.new_empty((rows,), dtype=torch.int32)
