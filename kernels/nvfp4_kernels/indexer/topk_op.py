"""Ops for the top-k keys of sparse attention: ``indexer_topk``, ``indexer_score_topk``.

Both return ``indices`` int32 ``(rows, top_k)`` and ``valid`` int32 ``(rows,)``. Row r of
``indices`` holds ``valid[r] = min(top_k, visible keys of row r)`` distinct keys in ascending order,
counted from the row's first visible key as in vLLM, then −1. The keys have the highest scores; of
keys with equal scores, the lower key wins. NaN counts as −inf, +inf is the highest, and −0 equals
+0.

The order is ascending for two reasons. Attention accepts any order with −1 at the end, but reads
memory best in ascending order. And a row that sees at most ``top_k`` keys is 0, 1, 2, … for any
scores, which need not be computed.
"""

from typing import Any

import torch
from torch import Tensor

from nvfp4_kernels.indexer.arguments import check_top_k, refuse_keys
from nvfp4_kernels.indexer.call import IndexerKeys, IndexerPagedKeys, ScoreCall
from nvfp4_kernels.indexer.formats import format_of
from nvfp4_kernels.indexer.kernels import SCORE_TOPK_KERNELS, TOPK_KERNELS
from nvfp4_kernels.indexer.score_arguments import check_logits, check_scored


def indexer_topk(
    logits: Tensor, lens: Tensor, top_k: int, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Keys of the ``top_k`` highest scores of each row, exact and deterministic.

    Args:
        logits: float32 ``(rows, columns)``, the last stride 1. Columns that a row does not see may
            hold anything.
        lens: int32 ``(rows,)``, number of keys that each row sees.
        top_k: number of keys to select, 1 to 4096; may exceed the number of columns.
        starts: int32 ``(rows,)``: row r sees columns ``starts[r] <= c < starts[r] + lens[r]``;
            None: ``starts`` are 0.

    Returns:
        ``indices`` and ``valid``; see the module's docstring.

    Raises:
        InvalidArgument: an unsupported or inconsistent argument; the message names it. The
            contents of tensors are checked on CPU only.
        NoKernelError: no kernel for this device.
    """
    return torch.ops.nvfp4.indexer_topk(logits, lens, top_k, starts)


def indexer_score_topk(
    q: Tensor,
    q_scales: Tensor | None,
    keys: IndexerKeys | IndexerPagedKeys,
    weights: Tensor,
    top_k: int,
    fmt: str,
) -> tuple[Tensor, Tensor]:
    """Fused ``indexer_logits`` and ``indexer_topk``; the logits are not stored.

    Neither keys nor pages are read for queries that see at most ``top_k`` keys. On sm_100
    candidates share shared memory with queries and keys, so that two cases in bf16 with D = 256 are
    refused: ``top_k`` ≥ 2433 with more than 112 heads, and ``top_k`` ≥ 3457 with more than 96.

    Args:
        q: see ``indexer_logits``.
        q_scales: see ``indexer_logits``.
        keys: see ``indexer_logits``.
        weights: see ``indexer_logits``.
        top_k: number of keys to select, 1 to 4096.
        fmt: see ``indexer_logits``.

    Returns:
        ``indices`` and ``valid`` of T or, with paged keys, ``B · next_n`` rows; indices are counted
        from ``ks`` or, with paged keys, from the sequence's first key. See the module's docstring.

    Raises:
        InvalidArgument, NoKernelError: as ``indexer_logits``.
    """
    ops = torch.ops.nvfp4
    if isinstance(keys, IndexerPagedKeys):
        cache, context_lens, *pages, block_size = keys
        return ops.indexer_score_topk_paged(
            q, q_scales, cache, weights, context_lens, *pages, top_k, fmt, block_size
        )
    if isinstance(keys, IndexerKeys):
        k, k_scales, ks, ke = keys
        return ops.indexer_score_topk(q, q_scales, k, k_scales, weights, ks, ke, top_k, fmt)
    raise refuse_keys(keys)


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


@torch.library.custom_op(
    "nvfp4::indexer_score_topk",
    mutates_args=(),
    schema="(Tensor q, Tensor? q_scales, Tensor k, Tensor? k_scales, Tensor weights, Tensor ks, "
    "Tensor ke, SymInt top_k, str fmt) -> (Tensor, Tensor)",
)
def _score_topk(*arguments: Any) -> tuple[Tensor, Tensor]:
    q, q_scales, k, k_scales, weights, ks, ke, top_k, fmt = arguments
    keys = IndexerKeys(k, k_scales, ks, ke)
    return _run(ScoreCall(q, q_scales, keys, weights, format_of(fmt), top_k))


@_score_topk.register_fake
def _(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *_, top_k, _ = rest
    return _new_result(q, q.shape[0], top_k)


@torch.library.custom_op(
    "nvfp4::indexer_score_topk_paged",
    mutates_args=(),
    schema="(Tensor q, Tensor? q_scales, Tensor cache, Tensor weights, Tensor context_lens, "
    "Tensor block_table, SymInt max_context_len, SymInt top_k, str fmt, SymInt block_size) "
    "-> (Tensor, Tensor)",
)
def _score_topk_paged(*arguments: Any) -> tuple[Tensor, Tensor]:
    q, q_scales, cache, weights, *pages, top_k, fmt, block_size = arguments
    keys = IndexerPagedKeys._make((cache, *pages, block_size))
    return _run(ScoreCall(q, q_scales, keys, weights, format_of(fmt), top_k))


@_score_topk_paged.register_fake
def _(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *_, top_k, _, _ = rest
    return _new_result(q, q.shape[0] * q.shape[1], top_k)


def _run(call: ScoreCall) -> tuple[Tensor, Tensor]:
    check_top_k(call.top_k)
    check_scored(call)
    return SCORE_TOPK_KERNELS.select(call.q.device, call.fmt.name).load()(call)


def _new_result(like: Tensor, rows: int, top_k: int) -> tuple[Tensor, Tensor]:
    """Allocate ``indices`` and ``valid`` on ``like``'s device, uninitialised."""
    indices = like.new_empty((rows, top_k), dtype=torch.int32)
    return indices, like.new_empty((rows,), dtype=torch.int32)
