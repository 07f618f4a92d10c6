"""Attention problems in every layout that the ops accept, and the formula in float64."""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
# Index of a page outside the cache: no kernel may look it up.
NO_PAGE = 1 << 30


@dataclass(frozen=True)
class Case:
    """Sequences of ``keys`` keys; the last ``queries`` tokens of each sequence are the queries."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    query_heads: int = 4
    heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    dtype: torch.dtype = BF16
    fp8: bool = False
    by_token: bool = False
    scale: float | None = None
    causal: bool = True
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False

    @property
    def uniform(self) -> bool:
        """Whether all sequences have equal lengths, so that dense tensors can hold the case."""
        return len(set(self.queries)) <= 1 and len(set(self.keys)) <= 1 and bool(self.queries)

    def problem(self) -> "Problem":
        """Return a problem of random values, with logits within a few units."""
        tokens, total = sum(self.queries), sum(self.keys)
        q = torch.randn(tokens, self.query_heads, self.head_dim).to(self.dtype)
        k, v = torch.randn(2, total, self.heads, self.head_dim).to(FP8 if self.fp8 else self.dtype)
        sinks = torch.randn(self.query_heads) if self.sinks else None
        k_scale, v_scale = (torch.tensor(s) for s in (0.37, 1.9)) if self.fp8 else (None, None)
        return Problem(self, q, k, v, sinks, k_scale, v_scale)


@dataclass(frozen=True)
class Problem:
    """Tensors of a case.

    Attributes:
        case: the sizes and options.
        q: ``(sum(queries), query_heads, head_dim)``.
        k, v: ``(sum(keys), heads, head_dim)``, as stored.
        sinks, k_scale, v_scale: as the ops take them.
    """

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None

    def paged(self, garbage: float = math.nan) -> dict[str, Any]:
        """Arguments of ``paged_attention``; cache slots without a key hold ``garbage``."""
        case, size = self.case, self.case.page_size
        cache, table = self._cache(garbage)
        return {
            "q": self.q,
            "kv_cache": cache,
            "block_table": table,
            "seq_lens": torch.tensor(case.keys, dtype=torch.int32),
            "query_start": starts(case.queries),
            "max_query_len": max(case.queries, default=0),
            "max_seq_len": -(-max(case.keys, default=0) // size) * size,  # an upper bound
            "k_scale": self.k_scale,
            "v_scale": self.v_scale,
            **self._scoring(),
        }

    def ragged(self) -> dict[str, Any]:
        """Arguments of ``attention`` with sequence starts."""
        return {
            "q": self.q,
            "k": self.k,
            "v": self.v,
            "query_start": starts(self.case.queries),
            "key_start": starts(self.case.keys),
            "max_query_len": max(self.case.queries, default=0),
            "max_key_len": max(self.case.keys, default=0),
            **self._scoring(),
        }

    def dense(self) -> dict[str, Any]:
        """Arguments of ``attention`` without sequence starts."""
        batch = len(self.case.queries)
        q, k, v = (x.view(batch, -1, *x.shape[1:]) for x in (self.q, self.k, self.v))
        return {"q": q, "k": k, "v": v, **self._scoring()}

    def _scoring(self) -> dict[str, Any]:
        case = self.case
        return {
            "scale": case.scale,
            "causal": case.causal,
            "window": case.window,
            "soft_cap": case.soft_cap,
            "sinks": self.sinks,
        }

    def _cache(self, garbage: float) -> tuple[Tensor, Tensor]:
        """Keys and values in shuffled pages; some pages belong to no sequence."""
        case, size = self.case, self.case.page_size
        pages = [-(-n // size) for n in case.keys]
        order = torch.randperm(sum(pages) + 3)
        shape = (len(order), size, case.heads, 2 * case.head_dim)
        cache = torch.full(shape, garbage).to(self.k.dtype)
        table = torch.full((len(pages), max(pages, default=0) + 2), NO_PAGE, dtype=torch.int32)
        stored = torch.cat([self.k, self.v], -1)
        used, row = 0, 0
        for sequence, (count, n) in enumerate(zip(case.keys, pages, strict=True)):
            mine = order[used : used + n]
            table[sequence, :n] = mine
            key = torch.arange(count)
            cache[mine[key // size], key % size] = stored[row : row + count]
            used, row = used + n, row + count
        cache = cache.transpose(1, 2)
        return cache if case.by_token else cache.contiguous(), table

    def formula(self) -> tuple[Tensor, Tensor]:
        """Compute the result in float64, sequence by sequence."""
        case = self.case
        q, k, v = self.q.double(), self.k.double(), self.v.double()
        if self.k_scale is not None and self.v_scale is not None:
            k, v = k * self.k_scale.double(), v * self.v_scale.double()
        k, v = (x.repeat_interleave(case.query_heads // case.heads, 1) for x in (k, v))
        out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
        row, first = 0, 0
        for queries, keys in zip(case.queries, case.keys, strict=True):
            mine, seen = slice(row, row + queries), slice(first, first + keys)
            logits = self._logits(torch.einsum("qhd,khd->qhk", q[mine], k[seen]))
            times = self._times(row, queries, keys).unsqueeze(1)
            weights = logits.exp().masked_fill(times == 0, 0.0) * times
            sums = weights.sum(-1)
            if self.sinks is not None:
                sums += self.sinks.double().exp()
            lse[mine] = sums.log()
            shares = (weights / sums.unsqueeze(-1)).masked_fill(times == 0, 0.0)
            out[mine] = torch.einsum("qhk,khd->qhd", shares, v[seen])
            row, first = row + queries, first + keys
        return out, lse

    def _times(self, row: int, queries: int, keys: int) -> Tensor:
        """Count how often each query of a sequence sees each key; ``row``: its first row in q."""
        position, key = torch.arange(keys - queries, keys).unsqueeze(1), torch.arange(keys)
        seen = torch.ones(queries, keys, dtype=torch.bool)
        if self.case.causal:
            seen &= key <= position
        if self.case.window is not None:
            seen &= key > position - self.case.window
        return seen

    def _logits(self, products: Tensor) -> Tensor:
        scale = 1 / math.sqrt(self.case.head_dim) if self.case.scale is None else self.case.scale
        if self.case.soft_cap is None:
            return products * scale
        return self.case.soft_cap * (products * scale / self.case.soft_cap).tanh()


def with_pages_of_nan(arguments: dict[str, Any], case: Case) -> dict[str, Any]:
    """Arguments whose block table points to a page of NaN wherever no query sees a key.

    Before a window, vLLM frees those pages; after the last key, their content is arbitrary.
    """
    cache, table = arguments["kv_cache"], arguments["block_table"]
    size, nan = case.page_size, len(cache)
    table = table.where(table < NO_PAGE, nan)
    for row, queries, keys in zip(table, case.queries, case.keys, strict=True):
        first = 0 if case.window is None else max(0, keys - queries - case.window + 1)
        row[: first // size] = nan
    pages = torch.full_like(cache[:1], 0).float() + math.nan
    given = {"kv_cache": torch.cat([cache, pages.to(cache.dtype)]), "block_table": table}
    return arguments | given


def unseen(case: Case) -> Problem:
    """Problem of a case of ``UNSEEN``; its first head has a sink of −inf, as padded heads have."""
    problem = case.problem()
    if problem.sinks is not None:
        problem.sinks[0] = -math.inf
    return problem


def check_values(out: Tensor, problem: Problem, weight: float) -> None:
    """Check a kernel's result against the formula.

    Each softmax weight is rounded once to V's format before the multiplication. The result changes
    by at most ``weight``, the relative error of this rounding (about half an ulp), times the sum
    over keys of softmax weight · |value|.
    """
    assert not out.isnan().any()
    expected, _ = problem.formula()
    spread, _ = replace(problem, v=problem.v.double().abs()).formula()
    half_ulp = torch.finfo(problem.case.dtype).eps / 2
    bound = half_ulp * expected.abs() + (weight + 1e-5) * spread + 1e-5
    off = (out.double().view(expected.shape) - expected).abs()
    worst = (off / bound).max() if out.numel() else torch.tensor(0.0)
    assert worst <= 1, f"off by {float(worst):.2f} times what rounding explains"


def growing_by_parts(fp8: bool, keys: int) -> Problem:
    """Problem whose logits grow by 16 (times E4M3's scale) every 32 keys, to a new maximum."""
    problem = Case((140,), (keys,), 2, 1, 128, causal=False, fp8=fp8, scale=1.0).problem()
    k = 0.05 * problem.k.float()
    k[..., 0] = 16.0 * (torch.arange(keys) // 32).unsqueeze(1)
    q = problem.q.float()
    q[..., 0] = 1.0
    return replace(problem, q=q.to(BF16), k=k.to(problem.k.dtype))


def small_weights(queries: int, keys: int, fp8: bool = False) -> Problem:
    """Problem of float16 whose results are sums of many values with weights of about 2^-26.

    Key 7 has nearly all the weight, and the value 0.
    """
    case = Case((queries,), (keys,), 2, 1, dtype=FP16, fp8=fp8, scale=1.0)
    problem = case.problem()
    problem.q.zero_()[..., 0] = 1.0
    k, v = torch.zeros(2, *problem.k.shape)
    k[7], v[8:] = 48.0 if fp8 else 18.0, 256.0
    return replace(problem, k=k.to(problem.k.dtype), v=v.to(problem.v.dtype))


def starts(lengths: tuple[int, ...]) -> Tensor:
    """Cumulative starts of sequences of ``lengths``, ending with the total."""
    ends = torch.tensor((0, *lengths)).cumsum(0)
    return ends.to(torch.int32)


MIXED = {"queries": (1, 19, 1, 3), "keys": (17, 19, 70, 35)}
EVERYTHING: dict[str, Any] = {"window": 21, "soft_cap": 3.0, "sinks": True, "scale": 0.2}

CASES = {
    "one token": Case((1,), (1,)),
    "decode": Case((1, 1, 1), (5, 64, 33)),
    "uniform decode": Case((1, 1, 1), (37, 37, 37)),
    "a few tokens each": Case((4, 4), (31, 64)),
    "prefill": Case((40,), (40,)),
    "prefill of two": Case((23, 23), (23, 23)),
    "after a prefix": Case((7,), (50,)),
    "mixed": Case(**MIXED),
    "fp16": Case(**MIXED, dtype=FP16),
    "MHA": Case(**MIXED, query_heads=3, heads=3),
    "MQA": Case(**MIXED, query_heads=5, heads=1),
    "groups of 8": Case(**MIXED, query_heads=16),
    "head dim 16": Case(**MIXED, head_dim=16),
    "head dim 96": Case(**MIXED, head_dim=96),
    "head dim 128": Case(**MIXED, head_dim=128),
    "head dim 192": Case(**MIXED, head_dim=192),
    "head dim 256": Case(**MIXED, head_dim=256),
    "pages of 32": Case(**MIXED, page_size=32),
    "pages of 64": Case(**MIXED, page_size=64),
    "pages of 128": Case(**MIXED, page_size=128),
    "heads after tokens": Case(**MIXED, by_token=True),
    "large scale": Case(**MIXED, scale=1.5),
    "not causal": Case(**MIXED, causal=False),
    "not causal, dense": Case((9, 9), (30, 30), causal=False),
    "window": Case(**MIXED, window=12),
    "window of one": Case(**MIXED, window=1),
    "window of a page": Case((1, 2, 30), (48, 49, 50), window=16),
    "window beyond all keys": Case(**MIXED, window=1000),
    "soft cap": Case(**MIXED, soft_cap=2.0),
    "sinks": Case(**MIXED, sinks=True),
    "everything": Case(**MIXED, **EVERYTHING, dtype=FP16, by_token=True, page_size=32),
    "fp8": Case(**MIXED, fp8=True),
    "fp8 by token": Case(**MIXED, fp8=True, by_token=True, head_dim=128),
    "fp8 everything": Case(**MIXED, **EVERYTHING, fp8=True, dtype=FP16, page_size=64),
    "no sequence": Case((), ()),
    "sequences without queries": Case((0, 3, 0), (5, 9, 0)),
    "no queries": Case((0, 0), (5, 0)),
    "no keys": Case((2, 2), (0, 0)),
    "no keys but sinks": Case((2, 1), (0, 7), sinks=True),
    "more queries than keys": Case((9, 4), (3, 20)),
    "more queries than keys, sinks": Case((5, 5), (2, 2), sinks=True),
    "more queries than keys, not causal": Case((5, 1), (2, 0), causal=False),
}
# Larger than a query tile and a key tile of the CPU or a GPU.
LARGE_CASES = {
    "long decode": Case((1, 1, 2), (1300, 30, 700)),
    "long window": Case((1, 40), (1300, 900), window=600, page_size=64),
    "long prefill": Case((300,), (300,), query_heads=8),
    "long prefill after a prefix": Case((150, 1), (700, 600), query_heads=8, **EVERYTHING),
    "long fp8": Case((1, 130), (900, 600), fp8=True, head_dim=16, sinks=True),
}
# Chunks; pages outside the queries' windows belong to other sequences.
UNSEEN = {
    ", ".join([step, f"D = {head_dim}", *(name for name, given in options.items() if given)]): (
        Case(*lengths, 4, 2, head_dim, page_size, **options)
    )
    for step, lengths, seen in (
        ("decode", ((1, 3, 1), (300, 264, 9)), 20),
        ("prefill", ((70, 9), (300, 200)), 100),
    )
    for head_dim, page_size in ((64, 16), (128, 64), (256, 32))
    for options in (
        {"fp8": fp8, "window": window, "sinks": sinks}
        for fp8 in (False, True)
        for window in (None, seen)
        for sinks in (False, True)
    )
}
EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
EVERY_LARGE_CASE = pytest.mark.parametrize("case", LARGE_CASES.values(), ids=LARGE_CASES)
