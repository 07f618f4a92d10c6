"""Cases of the indexer's scores with a forced ring depth or number of scale sets."""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from nvfp4_kernels.indexer.call import ScoreCall
from nvfp4_kernels.indexer.formats import Format
from nvfp4_kernels.indexer.sm100.choose import ScoreProblem, choose_config
from nvfp4_kernels.indexer.sm100.tile import ScoreTile
from nvfp4_kernels.tool.forced_product_case import SECTION
from nvfp4_kernels.tool.indexer_case import IndexerCase, keyed
from nvfp4_kernels.tool.task import Figures, Machine


@dataclass(frozen=True)
class ForcedScoresCase(IndexerCase):
    """Scores of paged keys by the chosen tile with a forced ring depth and number of scale sets.

    Attributes:
        what: property that the case tests, for its name.
        max_stages: maximum number of stages of the key-tile ring.
        scale_sets: number of scale sets of the tile.
    """

    what: str = ""
    max_stages: int = 3
    scale_sets: int = 1

    @property
    def section(self) -> str:
        """Section of the report."""
        return SECTION

    @property
    def name(self) -> str:
        """Name in the report."""
        return f"{self.what}, {super().name}"

    @property
    def tile(self) -> ScoreTile:
        """Chosen tile with the forced fields."""
        rows = len(self.lengths), self.next_n, max(self.lengths)
        problem = ScoreProblem(self.fmt, self.head_dim, self.heads, *rows)  # type: ignore[arg-type]
        chosen, _ = choose_config(problem)
        return replace(chosen, max_stages=self.max_stages, scale_sets=self.scale_sets)

    def run(self, machine: Machine) -> Figures:
        """Compare the scores, and report the ring's depth."""
        return super().run(machine) | {"stages": float(self.tile.stages)}

    def actual(self, given: dict[str, Any], fmt: Format) -> Tensor:
        """Scores of the kernel with ``tile``."""
        from nvfp4_kernels.indexer.sm100.launch_logits import logits

        return logits(ScoreCall(**keyed(given), fmt=fmt), self.tile)
