"""Correctness cases of the indexer's scores: the GPU kernel against the CPU reference."""

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from nvfp4_kernels import IndexerKeys, IndexerPagedKeys, indexer_logits
from nvfp4_kernels.dispatch import Mode
from nvfp4_kernels.indexer import reference
from nvfp4_kernels.indexer.call import ScoreCall
from nvfp4_kernels.indexer.formats import Format, format_of
from nvfp4_kernels.tool.task import Figures, Machine, Mismatch

# Tolerance per head, relative to the largest score: both sides add float32, in different orders.
TOLERANCE = 1e-6
FORMATS: tuple[Mode, ...] = ("nvfp4", "mxfp4", "fp8", "bf16")
GLOBAL_SCALE = 0.002


@dataclass(frozen=True)
class IndexerCase:
    """Scores of the last ``next_n`` tokens of each sequence, for paged or contiguous keys.

    Attributes:
        fmt: format of queries and keys.
        lengths: number of keys that each sequence's last query sees; an earlier query sees one less
            than the next query.
        next_n: number of queries of each sequence.
        heads, head_dim: sizes of a query.
        page_size: keys per page; 0: the keys of all sequences are contiguous.
    """

    fmt: str
    lengths: tuple[int, ...]
    next_n: int = 1
    heads: int = 64
    head_dim: int = 128
    page_size: int = 64

    @property
    def section(self) -> str:
        """Section of the report."""
        return "correctness"

    @property
    def name(self) -> str:
        """Name in the report."""
        keys_in = f"pages of {self.page_size}" if self.page_size else "contiguous"
        keys = ", ".join(map(str, self.lengths))
        heads = f"heads {self.heads}×{self.head_dim}"
        return f"indexer, {self.fmt}, {self.next_n} of {keys}, {heads}, {keys_in}"

    def run(self, machine: Machine) -> Figures:
        """Compare the scores; raise ``Mismatch`` if they differ."""
        fmt, given = format_of(self.fmt), self.tensors()
        there: dict[str, Any] = {
            name: x.to(machine.device) if isinstance(x, Tensor) else x for name, x in given.items()
        }
        expected = reference.logits(ScoreCall(**keyed(given), fmt=fmt))
        return _compare(self.actual(there, fmt).cpu(), expected, TOLERANCE * self.heads)

    def actual(self, given: dict[str, Any], fmt: Format) -> Tensor:
        """Scores of the op."""
        return indexer_logits(**keyed(given), fmt=fmt.name)

    def tensors(self) -> dict[str, Any]:
        """Arguments of the op, except for the format, on the CPU; see ``keyed``."""
        fmt, seeded = format_of(self.fmt), torch.Generator().manual_seed(0)
        rows = len(self.lengths) * self.next_n
        q = torch.randn(rows, self.heads, self.head_dim, generator=seeded).bfloat16()
        keys = torch.randn(sum(self.lengths), self.head_dim, generator=seeded).bfloat16()
        scale = torch.tensor(GLOBAL_SCALE) if fmt.name == "nvfp4" else None
        data, *scales = reference.quantize_q(q, fmt, scale)
        given: dict[str, Any] = {"q": data, "q_scales": scales[0] if scales else None}
        given["weights"] = torch.randn(rows, self.heads, generator=seeded)
        if self.page_size:
            by_sequence = len(self.lengths), self.next_n
            for name in ("q", "q_scales"):
                if given[name] is not None:
                    given[name] = given[name].unflatten(0, by_sequence)
            return given | self._pages(fmt, keys, scale)
        return given | self._contiguous(fmt, keys, scale)

    def _pages(self, fmt: Format, keys: Tensor, scale: Tensor | None) -> dict[str, Any]:
        """Arguments of the op for paged keys."""
        size = self.page_size
        counts = [-(-length // size) for length in self.lengths]
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).int()
        # Slots without a key hold what is NaN in every format.
        cache = torch.full((len(order), fmt.page_bytes(self.head_dim, size)), 0xFF).byte()
        table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        used, slots = 0, []
        for row, (count, length) in enumerate(zip(counts, self.lengths, strict=True)):
            pages = order[used : used + count]
            table[row, :count] = pages
            key = torch.arange(length)
            slots.append(pages.long()[key // size] * size + key % size)
            used += count
        reference.store_k(keys, cache, torch.cat(slots), fmt, size, scale)
        lens = torch.tensor(self.lengths).unsqueeze(1) - self._missing
        return {
            "cache": cache,
            "context_lens": lens.clamp(min=0).int(),
            "block_table": table,
            "max_context_len": max(self.lengths),
            "block_size": size,
        }

    def _contiguous(self, fmt: Format, keys: Tensor, scale: Tensor | None) -> dict[str, Any]:
        """Arguments of the op for contiguous keys."""
        data, *scales = reference.quantize_q(keys.unsqueeze(1), fmt, scale)
        ends = torch.tensor(self.lengths).cumsum(0)
        starts = (ends - torch.tensor(self.lengths)).repeat_interleave(self.next_n)
        last = torch.maximum((ends.unsqueeze(1) - self._missing).flatten(), starts)
        return {
            "k": data.squeeze(1),
            "k_scales": scales[0].squeeze(1) if scales else None,
            "ks": starts.int(),
            "ke": last.int(),
        }

    @property
    def _missing(self) -> Tensor:
        """Number of keys, for each query of a sequence, that only later queries see."""
        return torch.arange(self.next_n - 1, -1, -1)


def keyed(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a scoring op; the arguments that describe keys are packed into ``keys``."""
    kind: Any = IndexerPagedKeys if "cache" in given else IndexerKeys
    rest = {name: x for name, x in given.items() if name not in kind._fields}
    return rest | {"keys": kind(**{name: given[name] for name in kind._fields})}


def _compare(actual: Tensor, expected: Tensor, tolerance: float) -> Figures:
    """Compare logits; errors are relative to the largest logit."""
    seen = expected.isfinite()
    if not torch.equal(seen, actual.isfinite()):
        raise Mismatch("logits: not finite where the reference is, or the other way round")
    largest = float(expected[seen].abs().max())
    off = float((actual - expected)[seen].abs().max()) / largest
    if not off <= tolerance:
        raise Mismatch(f"logits: off by {off:.2g} of the largest, must be {tolerance:.2g} at most")
    return {"values": float(expected.numel()), "off": off}


def indexer_cases(quick: bool) -> list[IndexerCase]:
    """Cases of every format and head dimension, several page sizes, and few and many heads."""
    lengths = (1, 63, 64, 129, 700)
    cases = [
        IndexerCase(fmt, lengths, next_n, head_dim=d)
        for fmt, (next_n, d) in product(FORMATS, ((1, 64), (1, 128), (2, 128), (3, 256)))
    ]
    cases += [IndexerCase(fmt, lengths, 7, page_size=0) for fmt in FORMATS]
    cases += [
        IndexerCase(fmt, lengths, 3, heads, 64)
        for fmt, heads in product(("nvfp4", "fp8"), (1, 8, 12, 32, 128))
    ]
    cases += [IndexerCase("nvfp4", lengths, 2, page_size=size) for size in (16, 32, 128, 256)]
    if not quick:
        cases += [IndexerCase(fmt, tuple(range(1000, 9000, 1000))) for fmt in FORMATS]
        cases += [IndexerCase(fmt, (4096,), 300, page_size=0) for fmt in FORMATS]
    return cases
