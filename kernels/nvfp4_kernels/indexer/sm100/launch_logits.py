"""Launches of the scoring kernel on sm_100: ``indexer_logits`` and ``indexer_logits_paged``."""

from torch import Tensor

from nvfp4_kernels.indexer.formats import Format
from nvfp4_kernels.indexer.sm100.choose import choose_config
from nvfp4_kernels.indexer.sm100.kernel import IndexerLogitsSm100, LogitsArguments
from nvfp4_kernels.indexer.sm100.launch import Scoring, contiguous, paged
from nvfp4_kernels.indexer.sm100.logits import NEGATIVE_INFINITY
from nvfp4_kernels.indexer.sm100.tile import ScoreTile
from nvfp4_kernels.runtime.compile import launch


def logits(
    q: Tensor,
    q_scales: Tensor | None,
    k: Tensor,
    k_scales: Tensor | None,
    weights: Tensor,
    ks: Tensor,
    ke: Tensor,
    fmt: Format,
) -> Tensor:
    """See ``nvfp4_kernels.indexer.score_op.indexer_logits``.

    Raises:
        InvalidArgument: as ``launch.contiguous``.
    """
    return _logits(contiguous(q, q_scales, k, k_scales, weights, ks, ke, fmt), weights)


def logits_paged(
    q: Tensor,
    q_scales: Tensor | None,
    cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    max_context_len: int,
    fmt: Format,
    block_size: int,
    tile: ScoreTile | None = None,
) -> Tensor:
    """See ``nvfp4_kernels.indexer.score_op.indexer_logits_paged``.

    ``tile``: overrides the choice of a tile.

    Raises:
        InvalidArgument: as ``launch.paged``.
    """
    tensors = q, q_scales, cache, weights, context_lens, block_table
    return _logits(paged(*tensors, max_context_len, fmt, block_size), weights, tile)


def _logits(scoring: Scoring, like: Tensor, given: ScoreTile | None = None) -> Tensor:
    """Allocate and compute the logits ``(rows, keys)``, float32 as ``like``."""
    out = like.new_empty((scoring.rows, scoring.problem.keys))
    if out.numel() == 0:
        return out
    if scoring.keyless:
        return out.fill_(NEGATIVE_INFINITY)
    tile, splits = choose_config(scoring.problem, scoring.sms)
    kernel = IndexerLogitsSm100(given or tile, scoring.variant)
    launch(kernel, LogitsArguments(inputs=scoring.arguments(splits), out=out))
    return out
