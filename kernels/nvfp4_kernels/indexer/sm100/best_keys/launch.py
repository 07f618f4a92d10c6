"""Launches with fused top-k on sm_100: ``indexer_score_topk`` and its paged form."""

import torch
from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument
from nvfp4_kernels.indexer.formats import Format
from nvfp4_kernels.indexer.sm100.best_keys.candidates import TopkOutput
from nvfp4_kernels.indexer.sm100.best_keys.choose import MAX_KEYS, Choice, choose_config
from nvfp4_kernels.indexer.sm100.best_keys.kernel import IndexerScoreTopkSm100, ScoreTopkArguments
from nvfp4_kernels.indexer.sm100.launch import Scoring, contiguous, paged
from nvfp4_kernels.indexer.topk.launch import topk_with_ids
from nvfp4_kernels.runtime.compile import launch

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
        InvalidArgument: as ``launch.contiguous``; too many keys, or queries and keys too large to
            leave shared memory for ``top_k`` candidates.
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
        InvalidArgument: as ``launch.paged`` and ``score_topk``.
    """
    tensors = q, q_scales, cache, weights, context_lens, block_table
    scoring = paged(*tensors, max_context_len, fmt, block_size)
    return _best("max_context_len", scoring, context_lens, top_k)


def _best(name: str, scoring: Scoring, like: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Select the top-k keys of each query; ``name``: argument that bounds the number of keys."""
    rows, keys = scoring.rows, scoring.problem.keys
    if rows == 0 or keys == 0 or scoring.keyless:
        return like.new_full((rows, top_k), NO_KEY), like.new_zeros((rows,))
    choice = _choose(name, scoring, top_k)
    whole = choice.selection.whole
    width = top_k if whole else min(choice.splits * top_k, keys)
    out = TopkOutput(
        scores=None if whole else like.new_empty((rows, width), dtype=torch.float32),
        keys=like.new_empty((rows, width)),
        counts=like.new_empty((rows,)),
        stride=width,
        top_k=top_k,
    )
    kernel = IndexerScoreTopkSm100(choice.tile, scoring.variant, choice.selection)
    launch(kernel, ScoreTopkArguments(inputs=scoring.arguments(choice.splits), out=out))
    if whole:
        return out.keys, out.counts
    return topk_with_ids(out.scores, out.keys, out.counts, top_k)


def _choose(name: str, scoring: Scoring, top_k: int) -> Choice:
    """Choose a configuration; raise if none fits."""
    problem = scoring.problem
    if problem.keys > MAX_KEYS:
        raise InvalidArgument(
            f"{name}: {problem.keys} keys, must be at most {MAX_KEYS} on "
            f"{scoring.arch}; choose among parts of them, then among what was chosen"
        )
    choice = choose_config(problem, top_k, scoring.sms)
    if choice is None:
        raise InvalidArgument(
            f"top_k: is {top_k}, for which {problem.num_heads} {problem.fmt} heads of "
            f"{problem.head_dim} leave too little shared memory on "
            f"{scoring.arch}; take indexer_topk of the logits"
        )
    return choice
