"""``indexer_score_topk`` and ``indexer_score_topk_paged`` on sm_100."""

import torch
from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument
from nvfp4_kernels.indexer.formats import Format
from nvfp4_kernels.indexer.sm100.best_keys.choose import MAX_KEYS, Choice, choose_config
from nvfp4_kernels.indexer.sm100.best_keys.kernel import BestKeysSm100
from nvfp4_kernels.indexer.sm100.launch import Scoring, contiguous, paged
from nvfp4_kernels.indexer.topk.kernel import topk_named

NO_KEY = -1


def score_topk(
    q: Tensor,
    q_scales: Tensor | None,
    k: Tensor,
    k_scales: Tensor | None,
    weights: Tensor,
    ks: Tensor,
    ke: Tensor,
    top_k: int,
    fmt: Format,
) -> tuple[Tensor, Tensor]:
    """See ``nvfp4_kernels.indexer.topk_op.indexer_score_topk``.

    Raises:
        InvalidArgument: as ``scoring.contiguous``; too many keys, or too large queries and keys to
            leave shared memory for so many of the best.
    """
    scoring = contiguous(q, q_scales, k, k_scales, weights, ks, ke, fmt)
    return _best("k", scoring, ks, top_k)


def score_topk_paged(
    q: Tensor,
    q_scales: Tensor | None,
    cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    max_context_len: int,
    top_k: int,
    fmt: Format,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """See ``nvfp4_kernels.indexer.topk_op.indexer_score_topk_paged``.

    Raises:
        InvalidArgument: as ``scoring.paged`` and ``score_topk``.
    """
    tensors = q, q_scales, cache, weights, context_lens, block_table
    scoring = paged(*tensors, max_context_len, fmt, block_size)
    return _best("max_context_len", scoring, context_lens, top_k)


def _best(name: str, scoring: Scoring, like: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    rows, columns = scoring.rows, scoring.problem.columns
    if rows == 0 or columns == 0 or scoring.keyless:
        return like.new_full((rows, top_k), NO_KEY), like.new_zeros((rows,))
    choice = _choose(name, scoring, top_k)
    splits = choice.splits
    kernel = BestKeysSm100(choice.tile, scoring.variant, choice.selection)
    if choice.selection.whole:
        indices, valid = like.new_empty((rows, top_k)), like.new_empty((rows,))
        scoring.launch(kernel, None, indices, valid, top_k, top_k, splits=splits)
        return indices, valid
    width = min(splits * top_k, columns)
    keys, counts = like.new_empty((rows, width)), like.new_empty((rows,))
    scores = keys.new_empty((rows, width), dtype=torch.float32)
    scoring.launch(kernel, scores, keys, counts, width, top_k, splits=splits)
    return topk_named(scores, keys, counts, top_k)


def _choose(name: str, scoring: Scoring, top_k: int) -> Choice:
    problem = scoring.problem
    if problem.columns > MAX_KEYS:
        raise InvalidArgument(
            f"{name}: {problem.columns} keys, must be at most {MAX_KEYS} on sm_100; choose among "
            "parts of them, then among what was chosen"
        )
    choice = choose_config(problem, top_k, scoring.sms)
    if choice is None:
        raise InvalidArgument(
            f"top_k: is {top_k}, for which {problem.heads} {problem.fmt} heads of "
            f"{problem.head_dim} leave too little shared memory on sm_100; take indexer_topk of "
            "the logits"
        )
    return choice
