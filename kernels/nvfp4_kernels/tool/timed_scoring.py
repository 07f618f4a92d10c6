"""Timing of the indexer's scoring."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4_kernels import IndexerKeys, IndexerPagedKeys, indexer_logits
from nvfp4_kernels.indexer.formats import format_of
from nvfp4_kernels.tool.scoring import (
    PAGE_SIZE,
    ScoreShape,
    choose_scorer,
    deepseek_shapes,
    describe_scorer,
)
from nvfp4_kernels.tool.task import Figures, Machine
from nvfp4_kernels.tool.timed import cold_sets, figures

DATA_BYTE = 0x33  # two E2M1 codes of 1.5, an E4M3 scale of 1.375; as numbers of any format, finite


@dataclass(frozen=True)
class TimedScoring:
    """Timing of the scoring of one shape; torch has no kernel to compare with."""

    section: str
    shape: ScoreShape

    @property
    def name(self) -> str:
        """Name in the report."""
        shape = self.shape
        sizes = f"{shape.sequences} × {shape.queries} of {shape.keys}"
        return f"{shape.name}, {shape.fmt}, {sizes}, heads {shape.heads}×{shape.head_dim}"

    def run(self, machine: Machine) -> Figures:
        """Time the op, with operands cold in L2."""
        sets = cold_sets(self.shape.work.nbytes, machine.l2_bytes())
        make = self._paged if self.shape.paged else self._contiguous
        calls = [make(machine.device) for _ in range(sets)]
        choice = choose_scorer(self.shape, machine.sms())
        return figures(machine.seconds(calls), self.shape.work) | {
            "relu_us": 1e6 * choice.relu,
            "estimate_us": 1e6 * choice.estimate,
            "tile": describe_scorer(*choice.spec.fields),
        }

    def _queries(self, device: torch.device) -> tuple[list[Tensor | None], Tensor]:
        """Queries of all sequences, as a list of data and scales, and their weights."""
        shape = self.shape
        rows = shape.sequences * shape.queries
        weights = torch.randn(rows, shape.heads, device=device)
        return self._vectors(device, rows, shape.heads), weights

    def _vectors(self, device: torch.device, *counts: int) -> list[Tensor | None]:
        """Vectors ``(*counts, head_dim)``, all bytes ``DATA_BYTE``: data, and scales or None."""
        fmt = format_of(self.shape.fmt)
        empty = fmt.empty(torch.empty(0, device=device), counts, self.shape.head_dim)
        for tensor in empty:
            tensor.view(torch.uint8).fill_(DATA_BYTE)
        return [*empty, None][:2]

    def _paged(self, device: torch.device) -> Callable[[], object]:
        """Call of the op for paged keys."""
        shape, fmt = self.shape, format_of(self.shape.fmt)
        pages = -(-shape.keys // PAGE_SIZE)
        cache = torch.full(
            (shape.sequences * pages, fmt.page_bytes(shape.head_dim, PAGE_SIZE)),
            DATA_BYTE, device=device, dtype=torch.uint8,
        )  # fmt: skip
        table = torch.randperm(len(cache), device=device).int().view(shape.sequences, pages)
        before = torch.arange(shape.queries - 1, -1, -1, device=device, dtype=torch.int32)
        lens = (shape.keys - before).repeat(shape.sequences, 1)
        vectors, weights = self._queries(device)
        by_sequence = (shape.sequences, shape.queries)
        q, q_scales = (None if x is None else x.unflatten(0, by_sequence) for x in vectors)
        assert q is not None
        keys = IndexerPagedKeys(cache, lens, table, shape.keys, PAGE_SIZE)
        return lambda: indexer_logits(q, q_scales, keys, weights, shape.fmt)

    def _contiguous(self, device: torch.device) -> Callable[[], object]:
        """Call of the op for contiguous keys."""
        shape = self.shape
        (q, q_scales), weights = self._queries(device)
        k, k_scales = self._vectors(device, shape.keys)
        ends = shape.keys - torch.arange(shape.queries - 1, -1, -1, device=device)
        starts = torch.zeros_like(ends).int()
        assert q is not None
        assert k is not None
        keys = IndexerKeys(k, k_scales, starts, ends.int())
        return lambda: indexer_logits(q, q_scales, keys, weights, shape.fmt)


def scoring_timings(section: str, quick: bool) -> list[TimedScoring]:
    """Timings of DeepSeek's shapes; with ``quick``, of NVFP4 only."""
    shapes = deepseek_shapes()
    if quick:
        shapes = [shape for shape in shapes if shape.fmt == "nvfp4"]
    return [TimedScoring(section, shape) for shape in shapes]
