"""Launches of the top-k kernel: ``indexer_topk``, and the selection among splits' candidates."""

from torch import Tensor

from nvfp4_kernels.checks import InvalidArgument, strides_of
from nvfp4_kernels.devices import device_facts
from nvfp4_kernels.indexer.topk.choose import choose_config
from nvfp4_kernels.indexer.topk.kernel import IndexerTopk, TopkArguments
from nvfp4_kernels.indexer.topk.tile import MAX_COLUMNS
from nvfp4_kernels.runtime.compile import launch


def topk(logits: Tensor, lens: Tensor, top_k: int, starts: Tensor | None) -> tuple[Tensor, Tensor]:
    """See ``nvfp4_kernels.indexer.topk_op.indexer_topk``.

    Raises:
        InvalidArgument: rows are longer than ``MAX_COLUMNS``.
    """
    columns = logits.shape[1]
    if columns > MAX_COLUMNS:
        raise InvalidArgument(
            f"logits: has {columns} columns, must have at most {MAX_COLUMNS}; "
            "choose among parts of the rows, then among what was chosen"
        )
    return _topk(logits, None, lens, starts, top_k)


def topk_with_ids(scores: Tensor, ids: Tensor, lens: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Ids of the ``top_k`` highest-scored elements of each row, in the order of columns.

    Args:
        scores: float32 ``(rows, columns)``, contiguous, at most ``MAX_COLUMNS`` columns.
        ids: int32 ``(rows, columns)``, contiguous.
        lens: int32 ``(rows,)``, number of elements of each row.
        top_k: number of ids to select.

    Returns:
        ``indices`` and ``valid`` as from ``indexer_topk``, with ids instead of indices.
    """
    return _topk(scores, ids, lens, None, top_k)


def _topk(
    logits: Tensor, ids: Tensor | None, lens: Tensor, starts: Tensor | None, top_k: int
) -> tuple[Tensor, Tensor]:
    """Allocate ``indices`` ``(rows, top_k)`` and ``valid`` ``(rows,)``, and launch the kernel."""
    rows, columns = logits.shape
    indices, valid = lens.new_empty((rows, top_k)), lens.new_empty((rows,))
    if rows:
        tile = choose_config(rows, columns, top_k, device_facts(logits.device).sms)
        arguments = TopkArguments(
            logits=logits,
            ids=ids,
            lens=lens,
            starts=starts,
            indices=indices,
            valid=valid,
            stride=strides_of(logits)[0],
            top_k=top_k,
            rows=rows,
        )
        launch(IndexerTopk(tile, starts is not None, ids is not None), arguments)
    return indices, valid
