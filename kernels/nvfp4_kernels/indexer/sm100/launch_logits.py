"""Launch of the scoring kernel on sm_100: ``indexer_logits``."""

from torch import Tensor

from nvfp4_kernels.indexer.call import ScoreCall
from nvfp4_kernels.indexer.sm100.choose import choose_config
from nvfp4_kernels.indexer.sm100.kernel import IndexerLogitsSm100, LogitsArguments
from nvfp4_kernels.indexer.sm100.launch import scoring_of
from nvfp4_kernels.indexer.sm100.logits import NEGATIVE_INFINITY
from nvfp4_kernels.indexer.sm100.tile import ScoreTile
from nvfp4_kernels.runtime.compile import launch


def logits(call: ScoreCall, tile: ScoreTile | None = None) -> Tensor:
    """See ``nvfp4_kernels.indexer.score_op.indexer_logits``.

    ``tile``: tile to use; None: the tile that ``choose_config`` returns.

    Raises:
        InvalidArgument: as ``launch.scoring_of``.
    """
    scoring = scoring_of(call)
    out = call.weights.new_empty((scoring.rows, scoring.problem.keys))
    if out.numel() == 0:
        return out
    if scoring.keyless:
        return out.fill_(NEGATIVE_INFINITY)
    chosen, splits = choose_config(scoring.problem, scoring.facts.sms)
    kernel = IndexerLogitsSm100(tile or chosen, scoring.variant)
    launch(kernel, LogitsArguments(inputs=scoring.arguments(splits), out=out))
    return out
