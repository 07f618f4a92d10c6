"""Scoring kernel with fused top-k."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from cutlass import Float32, Int32

from nvfp4_kernels.device.arguments import example
from nvfp4_kernels.indexer.sm100.best_keys.candidates import TopkOutput
from nvfp4_kernels.indexer.sm100.best_keys.tile import Selection
from nvfp4_kernels.indexer.sm100.best_keys.visitor import TopkVisitor
from nvfp4_kernels.indexer.sm100.kernel import (
    ALIGNMENTS,
    POINTER_TYPES,
    IndexerLogitsSm100,
    ScoreArguments,
)


class ScoreTopkArguments(NamedTuple):
    """Arguments of a launch with fused top-k.

    Attributes:
        inputs: queries, keys and sizes.
        out: top-k keys, or candidates of splits.
    """

    inputs: ScoreArguments
    out: TopkOutput


OUTPUT_TYPES = {"scores": Float32, "keys": Int32, "counts": Int32}


@dataclass(frozen=True)
class IndexerScoreTopkSm100(IndexerLogitsSm100):
    """One compiled variant: ``IndexerLogitsSm100`` with an epilogue that selects the top-k.

    The epilogue warps of group ``group``, of all ping-pong sets, synchronise at named barrier
    ``group + 1``.
    """

    selection: Selection

    def __post_init__(self) -> None:
        assert self.tile.visitor_bytes >= self.selection.shared_bytes(self.tile)

    @property
    def visitor(self) -> TopkVisitor:
        """Visitor of the scores."""
        return TopkVisitor(self.tile, self.variant, self.selection)

    def signature(self) -> tuple[Any, ...]:
        """Example arguments of ``__call__``, for ``cute.compile``."""
        types = {**POINTER_TYPES, **OUTPUT_TYPES}
        alignments = {**ALIGNMENTS, **dict.fromkeys(OUTPUT_TYPES, 4)}
        return (example(ScoreTopkArguments, types, alignments),)
