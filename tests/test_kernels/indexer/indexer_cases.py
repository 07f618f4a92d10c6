"""Problems of the indexer, paged and contiguous, and their solutions."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nvfp4_kernels import (
    IndexerKeys,
    IndexerPagedKeys,
    indexer_logits,
    indexer_score_topk,
)
from tests.test_kernels.indexer.indexer_oracle import (
    KEY_BYTES,
    Stored,
    best,
    grid,
    padded,
    scores,
    write_page,
)
from tests.test_kernels.oracle import Float64

# Index of a page outside the cache: no kernel may look it up.
NO_PAGE = 1 << 30


@dataclass(frozen=True)
class Case:
    """Sequences of ``next_n`` queries; ``lens``: number of keys that each query sees."""

    lens: tuple[tuple[int, ...], ...]
    heads: int = 8
    head_dim: int = 64
    block_size: int = 16
    top_k: int = 8
    next_n: int = 1

    def problem(self, fmt: str, make: Any = grid) -> "Problem":
        """Problem with random values."""
        rng = np.random.default_rng(0)
        shape = len(self.lens), self.next_n, self.heads, self.head_dim
        keys = [make(fmt, rng, max(lens, default=0), self.head_dim) for lens in self.lens]
        weights = rng.integers(-3, 4, size=(shape[0] * shape[1], self.heads)).astype(np.float64)
        return Problem(self, fmt, make(fmt, rng, *shape), keys, weights)


@dataclass(frozen=True)
class Problem:
    """Values of a case: queries ``(B, next_n, H, D)``, keys by sequence, weights ``(rows, H)``."""

    case: Case
    fmt: str
    q: Stored
    keys: list[Stored]
    weights: Float64

    @property
    def lens(self) -> list[int]:
        """Number of keys that each row sees."""
        return [length for lens in self.case.lens for length in lens]

    def expected(self) -> list[Float64]:
        """Scores of the keys that each row sees."""
        queries = self.q.values.reshape(len(self.lens), *self.q.values.shape[2:])
        return [
            scores(queries[row], self.keys[row // self.case.next_n].values[:length], weights)
            for row, (length, weights) in enumerate(zip(self.lens, self.weights, strict=True))
        ]

    def expected_best(self) -> list[list[int]]:
        """Top-k keys of each row."""
        top_k = self.case.top_k
        return [padded(best(row, top_k), top_k) for row in self.expected()]

    def paged(self, unused: int = 0xFF, gap: int = 0) -> dict[str, Any]:
        """Arguments of ``indexer_logits`` with paged keys, not yet combined; see ``keyed``.

        Args:
            unused: byte that fills cache slots without a key; 0xFF is NaN in every format.
            gap: bytes between pages.
        """
        size = self.case.block_size
        counts = [-(-len(keys.values) // size) for keys in self.keys]
        numbers = np.random.default_rng(1).permutation(sum(counts) + 2).tolist()
        page_bytes = size * sum(KEY_BYTES[self.fmt](self.case.head_dim))
        cache = torch.full((len(numbers), page_bytes + gap), unused, dtype=torch.uint8)
        table = torch.full((len(counts), max(counts, default=0) + 1), NO_PAGE, dtype=torch.int32)
        for b, (keys, count) in enumerate(zip(self.keys, counts, strict=True)):
            pages = [numbers.pop() for _ in range(count)]
            table[b, :count] = torch.tensor(pages, dtype=torch.int32)
            write_page(self.fmt, keys, cache, pages, size)
        lens = torch.tensor(self.lens, dtype=torch.int32)
        return {
            "q": self.q.data,
            "q_scales": self.q.scales,
            "cache": cache[:, :page_bytes],
            "weights": torch.from_numpy(self.weights).float(),
            "context_lens": lens.view(len(self.keys), self.case.next_n),
            "block_table": table,
            "max_context_len": max(self.lens, default=0) + 3,
            "fmt": self.fmt,
            "block_size": size,
        }

    def contiguous(self) -> dict[str, Any]:
        """Arguments of ``indexer_logits``, not yet combined, with all keys concatenated."""
        counts = [len(keys.values) for keys in self.keys]
        starts = [sum(counts[: row // self.case.next_n]) for row in range(len(self.lens))]
        ends = [start + length for start, length in zip(starts, self.lens, strict=True)]
        q_scales, k_scales = self.q.scales, [keys.scales for keys in self.keys]
        return {
            "q": self.q.data.flatten(0, 1),
            "q_scales": None if q_scales is None else q_scales.flatten(0, 1),
            "k": joined([keys.data for keys in self.keys]),
            "k_scales": None
            if q_scales is None
            else joined([s for s in k_scales if s is not None]),
            "weights": torch.from_numpy(self.weights).float(),
            "ks": torch.tensor(starts, dtype=torch.int32),
            "ke": torch.tensor(ends, dtype=torch.int32),
            "fmt": self.fmt,
        }


def keyed(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments, with the arguments for the keys combined into one ``keys`` value."""
    kind: Any = IndexerPagedKeys if "cache" in given else IndexerKeys
    rest = {name: x for name, x in given.items() if name not in kind._fields}
    return rest | {"keys": kind(**{name: given[name] for name in kind._fields})}


def run_logits(**given: Any) -> Tensor:
    """Call ``indexer_logits`` with arguments that are not yet combined."""
    return indexer_logits(**keyed(given))


def run_score_topk(**given: Any) -> tuple[Tensor, Tensor]:
    """Call ``indexer_score_topk`` with arguments that are not yet combined."""
    return indexer_score_topk(**keyed(given))


def joined(parts: list[Tensor]) -> Tensor:
    """Concatenate tensors, also of dtypes that torch does not concatenate."""
    if parts[0].element_size() > 1:
        return torch.cat(parts)
    return torch.cat([p.view(torch.uint8) for p in parts]).view(parts[0].dtype)


CASES = {
    "one key": Case(((1,),)),
    "no keys": Case(((0,), (20,), (0,)), top_k=4),
    "keys at the ends of pages": Case(((15,), (16,), (17,), (32,), (33,))),
    "pages of one key": Case(((5,), (12,)), block_size=1),
    "pages of 64": Case(((63,), (64,), (65,), (129,)), block_size=64, top_k=50),
    "several queries": Case(((5, 6, 7), (32, 33, 34), (0, 0, 1)), next_n=3, top_k=5),
    "queries in any order": Case(((40, 3), (1, 20)), next_n=2),
    "top 1": Case(((30,), (1,)), top_k=1),
    "top of exactly all": Case(((7,), (8,), (9,)), top_k=8),
    "more than there are": Case(((30,), (1,)), top_k=100),
    "one head": Case(((30,),), heads=1),
    "no heads": Case(((30,),), heads=0),
    "64 heads of 128": Case(((100,), (70,)), heads=64, head_dim=128, top_k=32),
    "40 heads of 96": Case(((50,), (70,)), heads=40, head_dim=96, top_k=16),
    "heads of 32": Case(((50,),), head_dim=32),
    "heads of 256": Case(((50,),), head_dim=256),
    "longer than a block": Case(((1023,), (1024,), (1025,), (2100,)), top_k=512, block_size=64),
    "blocks that begin within a page": Case(((1500,), (1029,)), top_k=64, block_size=7),
    "tiles of queries": Case((tuple(range(20, 60)),), next_n=40, heads=64, head_dim=32),
}
