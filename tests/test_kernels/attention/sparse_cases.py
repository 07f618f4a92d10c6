"""Problems of ``sparse_attention``: attention problems in which every token has a list of keys."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.test_kernels.attention.attention_cases import (
    FP16,
    NO_PAGE,
    Case,
    Problem,
    starts,
)

AFTER = 1 << 30  # index of the slots after the end of a list


Lists = Sequence[Sequence[int]]


@dataclass(frozen=True)
class SparseCase(Case):
    """Token t attends to ``listed[t]`` keys of its sequence, chosen at random, in any order.

    Attributes:
        listed: number of keys per token.
        width: number of columns of the lists.
    """

    listed: tuple[int, ...] = ()
    width: int = 20

    def problem(self) -> "SparseProblem":
        counts = iter(self.listed)
        lists = [
            torch.randperm(keys)[: next(counts)].tolist()
            for queries, keys in zip(self.queries, self.keys, strict=True)
            for _ in range(queries)
        ]
        assert tuple(map(len, lists)) == self.listed
        return with_lists(super().problem(), lists, self.width)


@dataclass(frozen=True)
class SparseProblem(Problem):
    """Tensors of a case.

    Attributes:
        lists: key positions that each token attends to.
        width: number of columns of the lists.
    """

    lists: Lists = ()
    width: int = 0

    def _times(self, row: int, queries: int, keys: int) -> Tensor:
        times = torch.zeros(queries, keys)
        for query, listed in enumerate(self.lists[row : row + queries]):
            times[query] = torch.tensor(listed, dtype=torch.long).bincount(minlength=keys)
        return times

    def sparse(self, garbage: float = math.nan) -> dict[str, Any]:
        """Arguments of ``sparse_attention``.

        Every slot without a listed key holds ``garbage``; the table has no entry for pages without
        a listed key.
        """
        case, size = self.case, self.case.page_size
        cache, table = self._cache(garbage)
        row = 0
        for sequence, (queries, keys) in enumerate(zip(case.queries, case.keys, strict=True)):
            listed = {key for one in self.lists[row : row + queries] for key in one}
            row += queries
            for key in set(range(keys)) - listed:
                cache[table[sequence, key // size], :, key % size] = garbage
            for page in set(range(table.shape[1])) - {key // size for key in listed}:
                table[sequence, page] = NO_PAGE
        return {
            "q": self.q,
            "kv_cache": cache,
            "indices": self._indices(),
            "lens": torch.tensor([len(one) for one in self.lists], dtype=torch.int32),
            "block_table": table,
            "query_start": starts(case.queries),
            "scale": case.scale,
            "soft_cap": case.soft_cap,
            "sinks": self.sinks,
            "k_scale": self.k_scale,
            "v_scale": self.v_scale,
        }

    def _indices(self) -> Tensor:
        """Lists padded with −1, as by the indexer, or with an arbitrary index."""
        given = torch.full((len(self.lists), self.width), -1, dtype=torch.int32)
        given[::2] = AFTER
        for row, one in enumerate(self.lists):
            given[row, : len(one)] = torch.tensor(one, dtype=torch.int32)
        return given


def with_lists(problem: Problem, lists: Lists, width: int | None = None) -> SparseProblem:
    """Replace the list of each token."""
    given = {f.name: getattr(problem, f.name) for f in fields(Problem)}
    longest = max(map(len, lists), default=0)
    return SparseProblem(**given, lists=lists, width=longest if width is None else width)


def positions(case: Case) -> list[int]:
    """Position of every token in its sequence."""
    pairs = zip(case.queries, case.keys, strict=True)
    return [keys - queries + n for queries, keys in pairs for n in range(queries)]


def all_keys(case: Case) -> SparseProblem:
    """Problem in which every token attends to all keys of its sequence."""
    pairs = zip(case.queries, case.keys, strict=True)
    return with_lists(
        case.problem(), [range(keys) for queries, keys in pairs for _ in range(queries)]
    )


MIXED: dict[str, Any] = {
    "queries": (1, 4, 0, 2),
    "keys": (70, 33, 9, 150),
    "listed": (20, 3, 0, 19, 1, 4, 20),
}
EVERYTHING: dict[str, Any] = {"soft_cap": 3.0, "sinks": True, "scale": 0.2}
CASES = {
    "one key": SparseCase((1,), (1,), listed=(1,), width=1),
    "one key of many": SparseCase((1,), (90,), listed=(1,), width=7),
    "decode": SparseCase((1, 1, 1), (5, 64, 33), listed=(5, 17, 20)),
    "mixed": SparseCase(**MIXED),
    "fp16": SparseCase(**MIXED, dtype=FP16),
    "MHA": SparseCase(**MIXED, query_heads=3, heads=3),
    "MQA": SparseCase(**MIXED, query_heads=5, heads=1),
    "groups of 16": SparseCase(**MIXED, query_heads=32),
    **{f"head dim {d}": SparseCase(**MIXED, head_dim=d) for d in (*range(16, 257, 16),)},
    "pages of one": SparseCase(**MIXED, page_size=1),
    "pages of 24": SparseCase(**MIXED, page_size=24),
    "pages of 64": SparseCase(**MIXED, page_size=64),
    "heads after tokens": SparseCase(**MIXED, by_token=True),
    "soft cap": SparseCase(**MIXED, soft_cap=2.0),
    "sinks": SparseCase(**MIXED, sinks=True),
    "everything": SparseCase(**MIXED, **EVERYTHING, dtype=FP16, by_token=True, page_size=32),
    "fp8": SparseCase(**MIXED, fp8=True),
    "fp8 by token": SparseCase(**MIXED, fp8=True, by_token=True, head_dim=128),
    "fp8 everything": SparseCase(**MIXED, **EVERYTHING, fp8=True, dtype=FP16, page_size=64),
    "no sequence": SparseCase((), ()),
    "no queries": SparseCase((0, 0), (5, 0)),
    "empty lists": SparseCase((2, 1), (7, 9), listed=(0, 0, 0)),
    "empty lists but sinks": SparseCase((2, 1), (7, 9), listed=(0, 0, 0), sinks=True),
    "lists of no columns": SparseCase((2, 1), (7, 9), listed=(0, 0, 0), width=0),
    "full lists": SparseCase((2,), (40,), listed=(33, 33), width=33),
}
# Key counts beyond a tile of the CPU or a GPU, up to the indexer's top-k.
LARGE_CASES = {
    "long lists": SparseCase((1, 2), (1300, 700), listed=(1201, 600, 513), width=1201),
    "4096 keys": SparseCase((1,), (4500,), listed=(4096,), width=4096, page_size=64),
    "many tokens": SparseCase((140,), (200,), query_heads=8, listed=tuple(range(140)), width=139),
    "fp8, long": SparseCase((3,), (1100,), fp8=True, listed=(1000, 7, 999), width=1003, sinks=True),
}
EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
