"""Scores of ``indexer_logits``, contiguous or paged, alone or fused with top-k, against an oracle.

Values on the oracle's grid make every float32 sum exact: scores are bit-identical, ties are ties.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nvfp4_kernels import (
    IndexerKeys,
    indexer_logits,
    indexer_quantize_q,
    indexer_score_topk,
    indexer_store_k,
    indexer_topk,
)
from nvfp4_kernels.indexer import reference
from tests.test_kernels.indexer.indexer_cases import (
    CASES,
    NO_PAGE,
    Case,
    Problem,
    run_logits,
    run_score_topk,
)
from tests.test_kernels.indexer.indexer_oracle import (
    FORMATS,
    KEY_BYTES,
    any_values,
    best,
    dequantize,
    grid,
    scores,
)
from tests.test_kernels.oracle import float64

CASE_NAMES = pytest.mark.parametrize("name", CASES)
FMTS = pytest.mark.parametrize("fmt", FORMATS)


def check_rows(found: Tensor, expected: list[Any], firsts: list[int]) -> None:
    """Check that rows hold ``expected`` from their first key on, and −inf elsewhere."""
    wanted = np.full(found.shape, -np.inf)
    for row, (values, first) in enumerate(zip(expected, firsts, strict=True)):
        wanted[row, first : first + len(values)] = values
    np.testing.assert_array_equal(found.double().numpy(), wanted)


def check_best(found: tuple[Tensor, Tensor], problem: Problem) -> None:
    indices, valid = found
    assert indices.dtype == valid.dtype == torch.int32
    assert indices.shape == (len(problem.lens), problem.case.top_k)
    assert indices.tolist() == problem.expected_best()
    assert valid.tolist() == [min(length, problem.case.top_k) for length in problem.lens]


@FMTS
@CASE_NAMES
def test_logits(name: str, fmt: str) -> None:
    problem = CASES[name].problem(fmt)
    arguments = problem.contiguous()
    check_rows(run_logits(**arguments), problem.expected(), arguments["ks"].tolist())


@FMTS
@CASE_NAMES
def test_logits_paged(name: str, fmt: str) -> None:
    problem = CASES[name].problem(fmt)
    logits = run_logits(**problem.paged())
    check_rows(logits, problem.expected(), [0] * len(problem.lens))


@FMTS
@CASE_NAMES
def test_score_topk(name: str, fmt: str) -> None:
    problem = CASES[name].problem(fmt)
    check_best(run_score_topk(**problem.contiguous(), top_k=problem.case.top_k), problem)


@FMTS
@CASE_NAMES
def test_score_topk_paged(name: str, fmt: str) -> None:
    problem = CASES[name].problem(fmt)
    check_best(run_score_topk(**problem.paged(), top_k=problem.case.top_k), problem)


@FMTS
def test_top_k_of_logits(fmt: str) -> None:
    """Scores, then top-k of the scores, with starts for contiguous keys."""
    problem = CASES["several queries"].problem(fmt)
    top_k = problem.case.top_k
    contiguous, paged = problem.contiguous(), problem.paged()
    lens = torch.tensor(problem.lens, dtype=torch.int32)
    check_best(indexer_topk(run_logits(**contiguous), lens, top_k, contiguous["ks"]), problem)
    check_best(indexer_topk(run_logits(**paged), lens, top_k), problem)


@FMTS
def test_prefill(fmt: str) -> None:
    """Ranges with arbitrary ends, some of them empty."""
    rng = np.random.default_rng(2)
    q, k = grid(fmt, rng, 50, 8, 64), grid(fmt, rng, 300, 64)
    weights = rng.integers(-3, 4, size=(50, 8)).astype(np.float64)
    ks, ke = np.sort(rng.integers(0, 301, size=(2, 50)), axis=0).astype(np.int32)
    ke[7] = ks[7]
    expected = [
        scores(q.values[t], k.values[ks[t] : ke[t]], weights[t]) for t in range(len(weights))
    ]
    keys = IndexerKeys(k.data, k.scales, torch.from_numpy(ks), torch.from_numpy(ke))
    operands = q.data, q.scales, keys, torch.from_numpy(weights).float()
    check_rows(indexer_logits(*operands, fmt), expected, ks.tolist())
    indices, valid = indexer_score_topk(*operands, 20, fmt)
    chosen = [row[:count] for row, count in zip(indices.tolist(), valid.tolist(), strict=True)]
    assert chosen == [best(row, 20) for row in expected]


@FMTS
def test_any_values(fmt: str) -> None:
    """Values off the grid stay within the bound of float32 sums of D products and H heads."""
    problem = Case(((1500,), (40,)), heads=32, head_dim=128).problem(fmt, any_values)
    logits = run_logits(**problem.paged()).double().numpy()
    for row, expected in enumerate(problem.expected()):
        keys = problem.keys[row].values
        largest = np.abs(problem.weights[row]) @ (np.abs(problem.q.values[row, 0]) @ np.abs(keys.T))
        error = np.abs(logits[row, : len(expected)] - expected)
        assert (error <= (128 + 32 + 2) * 2.0**-24 * largest).all()


@pytest.mark.parametrize(
    ("fmt", "error"), [("nvfp4", 0.2), ("mxfp4", 0.3), ("fp8", 0.06), ("bf16", 1e-6)]
)
def test_from_queries_and_keys(fmt: str, error: float) -> None:
    """Quantised, stored and scored vectors give the bfloat16 scores within the format's error."""
    q, k = torch.randn(3, 1, 16, 128).bfloat16(), torch.randn(500, 128).bfloat16()
    q_scale, k_scale = torch.tensor(0.002), torch.tensor(0.0015)
    given = (q_scale, k_scale) if fmt == "nvfp4" else (None, None)
    weights = torch.rand(3, 16)
    data, scales = indexer_quantize_q(q.squeeze(1), fmt, given[0])
    cache = torch.zeros(8, 64 * sum(KEY_BYTES[fmt](128)), dtype=torch.uint8)
    indexer_store_k(k, cache, torch.arange(500), fmt, 64, given[1])
    arguments = {
        "q": data.unsqueeze(1),
        "q_scales": None if scales is None else scales.unsqueeze(1),
        "cache": cache,
        "weights": weights * q_scale * k_scale if fmt == "nvfp4" else weights,
        "context_lens": torch.full((3, 1), 500, dtype=torch.int32),
        "block_table": torch.arange(8, dtype=torch.int32).repeat(3, 1),
        "max_context_len": 500,
        "fmt": fmt,
        "block_size": 64,
    }
    found = run_logits(**arguments).double().numpy()
    exact = [
        scores(queries, float64(k), row)
        for queries, row in zip(float64(q.squeeze(1)), float64(weights), strict=True)
    ]
    away = np.linalg.norm(found - exact) / np.linalg.norm(exact - np.mean(exact))
    assert away < error
    assert fmt == "bf16" or away > error / 10  # so that the bound is tight


def test_fp8_scales_in_the_weights() -> None:
    problem = CASES["several queries"].problem("fp8")
    for op, arguments in (
        (run_logits, problem.contiguous()),
        (run_logits, problem.paged()),
    ):
        folded = arguments["weights"] * arguments["q_scales"].view(arguments["weights"].shape)
        changed = arguments | {"q_scales": None, "weights": folded}
        torch.testing.assert_close(op(**changed), op(**arguments), rtol=0, atol=0)


@FMTS
def test_pages_apart(fmt: str) -> None:
    """A cache that is a strided view: gaps between pages have no alignment."""
    problem = CASES["keys at the ends of pages"].problem(fmt)
    arguments = problem.paged(gap=5)
    assert not arguments["cache"].is_contiguous()
    check_rows(run_logits(**arguments), problem.expected(), [0] * len(problem.lens))
    check_best(run_score_topk(**arguments, top_k=problem.case.top_k), problem)


@FMTS
@pytest.mark.parametrize("unused", [0x00, 0x7F, 0xFF])
def test_garbage_in_unused_slots(fmt: str, unused: int) -> None:
    problem = CASES["keys at the ends of pages"].problem(fmt)
    arguments = problem.paged(unused=unused)
    check_rows(run_logits(**arguments), problem.expected(), [0] * len(problem.lens))
    check_best(run_score_topk(**arguments, top_k=problem.case.top_k), problem)


@FMTS
def test_garbage_in_unused_keys(fmt: str) -> None:
    """NaN in contiguous keys that no query of the row sees changes nothing."""
    problem = CASES["no keys"].problem(fmt)
    arguments = problem.contiguous()
    k = joined_with_garbage(arguments["k"])
    k_scales = arguments["k_scales"]
    if k_scales is not None:
        k_scales = joined_with_garbage(k_scales)
    arguments |= {"k": k, "k_scales": k_scales}
    check_rows(run_logits(**arguments), problem.expected(), arguments["ks"].tolist())


def joined_with_garbage(x: Tensor) -> Tensor:
    """Append seven rows of NaN."""
    garbage = torch.full((7, *x[0].reshape(-1).view(torch.uint8).shape), 0xFF, dtype=torch.uint8)
    rows = x.reshape(len(x), -1).view(torch.uint8)
    return torch.cat([rows, garbage]).view(x.dtype).view(len(x) + 7, *x.shape[1:])


@FMTS
def test_nan_in_a_key(fmt: str) -> None:
    """A key of NaN scores NaN, which counts as −inf; other scores are unchanged."""
    problem = Case(((40,),), top_k=39).problem(fmt)
    poisoned = problem.keys[0]
    part = poisoned.data if poisoned.scales is None else poisoned.scales
    part[5].view(-1).view(torch.uint8).fill_(0xFF)
    arguments = problem.paged()
    logits = run_logits(**arguments)[0, :40]
    assert logits.isnan().nonzero().flatten().tolist() == [5]
    values = dequantize(fmt, poisoned.data, poisoned.scales)
    expected = scores(problem.q.values[0, 0], values, problem.weights[0])
    indices, _ = run_score_topk(**arguments, top_k=39)
    assert indices[0].tolist() == best(expected, 39)
    assert 5 not in indices[0]


def test_short_rows_are_not_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of at most ``top_k`` keys are not scored, and their pages are not looked up."""
    problem = Case(((8,), (30,), (1,)), top_k=8).problem("nvfp4")
    arguments = problem.paged()
    arguments["block_table"][0] = arguments["block_table"][2] = NO_PAGE
    check_best(run_score_topk(**arguments, top_k=8), problem)

    seen = []
    read = reference.ContiguousKeys.stored

    def watched(keys: reference.ContiguousKeys, first: int, count: int) -> Any:
        seen.extend(range(first, first + count))
        return read(keys, first, count)

    monkeypatch.setattr(reference.ContiguousKeys, "stored", watched)
    check_best(run_score_topk(**problem.contiguous(), top_k=8), problem)
    assert seen == list(range(8, 38))


@pytest.mark.parametrize(("batch", "next_n"), [(0, 1), (0, 0), (2, 0)])
@FMTS
def test_no_queries(fmt: str, batch: int, next_n: int) -> None:
    problem = Case(((),) * batch, next_n=next_n).problem(fmt)
    assert run_logits(**problem.paged()).shape == (0, 3)
    indices, valid = run_score_topk(**problem.paged(), top_k=8)
    assert indices.shape == (0, 8)
    assert valid.shape == (0,)


@FMTS
def test_no_keys_at_all(fmt: str) -> None:
    problem = Case(((0,), (0,))).problem(fmt)
    assert run_logits(**problem.contiguous()).shape == (2, 0)
    check_best(run_score_topk(**problem.contiguous(), top_k=8), problem)


@pytest.mark.processes
@FMTS
def test_long_context(fmt: str) -> None:
    """128K keys in shuffled pages, two queries: every score, and the best 2048."""
    length, size, head_dim = 131072, 64, 64
    rng = np.random.default_rng(3)
    q, few = grid(fmt, rng, 1, 2, 8, head_dim), grid(fmt, rng, 997, head_dim)
    repeated = np.arange(length) % len(few.values)  # all pages differ
    parts = [few.data] if few.scales is None else [few.data, few.scales]
    in_bytes = (part.reshape(len(few.values), -1).view(torch.uint8) for part in parts)
    pages = torch.cat([part[repeated].view(length // size, -1) for part in in_bytes], dim=1)
    order = torch.randperm(len(pages))
    cache = torch.empty_like(pages)
    cache[order] = pages
    weights = rng.integers(-3, 4, size=(2, 8)).astype(np.float64)
    arguments = {
        "q": q.data,
        "q_scales": q.scales,
        "cache": cache,
        "weights": torch.from_numpy(weights).float(),
        "context_lens": torch.tensor([[length - 1, length]], dtype=torch.int32),
        "block_table": order.int().unsqueeze(0),
        "max_context_len": length,
        "fmt": fmt,
        "block_size": size,
    }
    expected = [scores(q.values[0, n], few.values, weights[n])[repeated] for n in range(2)]
    expected[0] = expected[0][:-1]
    check_rows(run_logits(**arguments), expected, [0, 0])
    indices, valid = run_score_topk(**arguments, top_k=2048)
    assert indices.tolist() == [best(row, 2048) for row in expected]
    assert valid.tolist() == [2048, 2048]
