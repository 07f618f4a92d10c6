"""Launch with fused top-k on sm_100: ``indexer_score_topk``."""

import torch
from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument
from nvfp4_kernels.indexer.call import IndexerPagedKeys, ScoreCall
from nvfp4_kernels.indexer.sm100.best_keys.candidates import TopkOutput
from nvfp4_kernels.indexer.sm100.best_keys.choose import MAX_KEYS, Choice, choose_config
from nvfp4_kernels.indexer.sm100.best_keys.kernel import IndexerScoreTopkSm100, ScoreTopkArguments
from nvfp4_kernels.indexer.sm100.launch import Scoring, scoring_of
from nvfp4_kernels.indexer.topk.launch import topk_with_ids
from nvfp4_kernels.runtime.compile import launch

NO_KEY = -1


def score_topk(call: ScoreCall) -> tuple[Tensor, Tensor]:
    """See ``nvfp4_kernels.indexer.topk_op.indexer_score_topk``.

    Raises:
        InvalidArgument: as ``scoring_of``; also for more than ``MAX_KEYS`` keys, or queries and
            keys too large to leave shared memory for ``top_k`` candidates.
    """
    scoring, top_k = scoring_of(call), call.top_k
    like = scoring.ranges.ends
    rows, keys = scoring.rows, scoring.problem.keys
    if rows == 0 or keys == 0 or scoring.keyless:
        return like.new_full((rows, top_k), NO_KEY), like.new_zeros((rows,))
    choice = _choose(call, scoring)
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


def _choose(call: ScoreCall, scoring: Scoring) -> Choice:
    """Choose a configuration; raise if none fits."""
    problem, top_k = scoring.problem, call.top_k
    if problem.keys > MAX_KEYS:
        name = "max_context_len" if isinstance(call.keys, IndexerPagedKeys) else "k"
        raise InvalidArgument(
            f"{name}: {problem.keys} keys, must be at most {MAX_KEYS} on "
            f"{scoring.facts.arch}; choose among parts of them, then among what was chosen"
        )
    choice = choose_config(problem, top_k, scoring.facts.sms)
    if choice is None:
        raise InvalidArgument(
            f"top_k: is {top_k}, for which {problem.num_heads} {problem.fmt} heads of "
            f"{problem.head_dim} leave too little shared memory on "
            f"{scoring.facts.arch}; take indexer_topk of the logits"
        )
    return choice
