"""``sparse_attention`` on the CPU: against the formula in float64 and against related ops."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nvfp4_kernels import (
    IndexerPagedKeys,
    indexer_score_topk,
    indexer_store_k,
    merge_segments,
    paged_attention,
    sparse_attention,
)
from nvfp4_kernels.attention import reference, sparse_reference
from nvfp4_kernels.attention.kernels import SPARSE_KERNELS
from tests.test_kernels.attention.attention_cases import BF16, Case
from tests.test_kernels.attention.attention_cases import CASES as DENSE_CASES
from tests.test_kernels.attention.sparse_cases import (
    CASES,
    EVERY_CASE,
    LARGE_CASES,
    SparseCase,
    all_keys,
    positions,
    with_lists,
)
from tests.test_kernels.attention.test_attention import check, positional
from tests.test_kernels.compilation import check_compiled, check_op
from tests.test_kernels.strategies import PROPERTY

Result = tuple[Tensor, Tensor]


@EVERY_CASE
def test_cases(case: SparseCase) -> None:
    problem = case.problem()
    check(sparse_attention(**problem.sparse()), problem)


@pytest.mark.parametrize("case", LARGE_CASES.values(), ids=LARGE_CASES)
def test_large(case: SparseCase) -> None:
    """Cases of more than one query tile and more than one block of keys."""
    problem = case.problem()
    check(sparse_attention(**problem.sparse()), problem)


@PROPERTY
@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 60)), max_size=5),
    st.sampled_from([(2, 2), (6, 2), (3, 1)]),
    st.sampled_from([1, 8, 16, 24, 64]),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_any_lists(
    sequences: list[tuple[int, int]],
    heads: tuple[int, int],
    page_size: int,
    sinks: bool,
    fp8: bool,
    data: st.DataObject,
) -> None:
    queries, keys = (tuple(x) for x in zip(*sequences, strict=True)) if sequences else ((), ())
    listed = tuple(
        data.draw(st.integers(0, have)) for asked, have in sequences for _ in range(asked)
    )
    width = max(listed, default=0) + data.draw(st.integers(0, 3))
    case = SparseCase(
        queries, keys, *heads, head_dim=16, page_size=page_size, fp8=fp8, by_token=sinks,
        sinks=sinks, listed=listed, width=width,
    )  # fmt: skip
    problem = case.problem()
    check(sparse_attention(**problem.sparse()), problem)


# --- against related ops ----------------------------------------------------------------------


def close(found: Result, expected: Result) -> None:
    """Check that two results agree within their roundings to BF16."""
    torch.testing.assert_close(found[0], expected[0], rtol=2**-7, atol=1e-4)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("name", ["mixed", "everything", "fp8 everything", "MQA"])
def test_all_keys_are_those_of_paged_attention(name: str) -> None:
    case = replace(DENSE_CASES[name], causal=False, window=None)
    problem = all_keys(case)
    close(sparse_attention(**problem.sparse()), paged_attention(**problem.paged()))


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_window_and_list_are_attention_to_both(fp8: bool, sinks: bool) -> None:
    """Attention to a window merged with attention to a list equals attention to the keys of both.

    The merge adds the sinks.
    """
    case = Case((1, 5, 1), (70, 40, 6), window=8, fp8=fp8, sinks=sinks)
    problem = case.problem()
    window, before = [], []
    for position in positions(case):
        first = max(0, position - 7)
        window.append(list(range(first, position + 1)))
        before.append(torch.randperm(first)[:11].tolist())
    assert [] in before
    segments = [
        paged_attention(**problem.paged() | {"sinks": None}),
        sparse_attention(**with_lists(problem, before).sparse() | {"sinks": None}),
    ]
    outs, lses = (torch.stack(x) for x in zip(*segments, strict=True))
    out, lse = merge_segments(outs, lses, problem.sinks)
    both = with_lists(problem, [a + b for a, b in zip(window, before, strict=True)])
    expected, log = both.formula()
    # Each segment is rounded to BF16, as is the merged result; values lie within ±5, times v_scale.
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=2**-5)
    torch.testing.assert_close(lse.double(), log, rtol=1e-6, atol=1e-5)


def test_lists_of_the_indexer() -> None:
    """The indexer's indices and lengths are passed on unchanged."""
    torch.manual_seed(3)
    lengths, block_size, k = (70, 9, 33), 16, 20
    problem = all_keys(Case((1,) * 3, lengths))
    arguments = problem.sparse()
    keys = torch.randn(sum(lengths), 32).to(BF16)
    table = arguments["block_table"]
    cache = torch.zeros(len(arguments["kv_cache"]), block_size * 64, dtype=torch.uint8)
    slots = [
        int(table[b, n // block_size]) * block_size + n % block_size
        for b, length in enumerate(lengths)
        for n in range(length)
    ]
    indexer_store_k(keys, cache, torch.tensor(slots), "bf16", block_size)
    q, weights = torch.randn(3, 1, 4, 32).to(BF16), torch.randn(3, 4)
    lens = torch.tensor(lengths, dtype=torch.int32).view(3, 1)
    pages = table.where(table < len(cache), 0)
    keys_in_pages = IndexerPagedKeys(cache, lens, pages, 80, block_size)
    indices, valid = indexer_score_topk(q, None, keys_in_pages, weights, k, "bf16")
    assert valid.tolist() == [20, 9, 20]
    lists = tuple(tuple(row[:n]) for row, n in zip(indices.tolist(), valid.tolist(), strict=True))
    found = sparse_attention(**arguments | {"indices": indices, "lens": valid})
    check(found, replace(problem, lists=lists))


# --- layouts ----------------------------------------------------------------------------------


def test_order_does_not_matter() -> None:
    problem = CASES["mixed"].problem()
    turned = replace(problem, lists=tuple(one[::-1] for one in problem.lists))
    close(sparse_attention(**turned.sparse()), sparse_attention(**problem.sparse()))


def test_a_key_counts_as_often_as_it_is_listed() -> None:
    problem = SparseCase((1,), (9,), listed=(3,)).problem()
    problem = replace(problem, lists=((4, 2, 4),))
    check(sparse_attention(**problem.sparse()), problem)


def test_garbage_does_not_matter() -> None:
    for name in ("everything", "fp8 everything"):
        problem = CASES[name].problem()
        results = []
        for garbage in (0.0, math.nan, 448.0):
            torch.manual_seed(1)
            results.append(sparse_attention(**problem.sparse(garbage)))
        for result in results[1:]:
            assert torch.equal(result[0], results[0][0])
            assert torch.equal(result[1], results[0][1])


def test_strides() -> None:
    """Strided views: lists in a wider buffer, q in a projection, one layer of a shared cache."""
    problem = CASES["mixed"].problem()
    arguments = problem.sparse()
    expected = sparse_attention(**arguments)
    q, cache, indices = (arguments[name] for name in ("q", "kv_cache", "indices"))
    projected = torch.full((len(q), 8, 64), math.nan, dtype=BF16)
    projected[:, 2:6] = q
    layers = torch.full((len(cache), 3, *cache.shape[1:]), math.nan, dtype=BF16)
    layers[:, 1] = cache
    wide = torch.cat([indices, torch.full_like(indices, 1 << 29)], 1)[:, : indices.shape[1]]
    for changed in ({"q": projected[:, 2:6]}, {"kv_cache": layers[:, 1]}, {"indices": wide}):
        found = sparse_attention(**arguments | changed)
        assert found[0].is_contiguous()
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


def test_rows_after_the_last_sequence() -> None:
    """Padding rows: their lists are not read; their result is that of rows without keys."""
    problem = CASES["mixed"].problem()
    arguments = problem.sparse()
    padding = {"q": math.nan, "indices": 1 << 30, "lens": 1 << 30}
    for name, value in padding.items():
        given = arguments[name]
        arguments[name] = torch.cat([given, torch.full_like(given[:5], value)])
    out, lse = sparse_attention(**arguments)
    assert len(out) == len(lse) == len(problem.q) + 5
    check((out[:-5], lse[:-5]), problem)


def test_out() -> None:
    arguments = CASES["mixed"].problem().sparse()
    expected, expected_lse = sparse_attention(**arguments)
    place = torch.full_like(expected, math.nan)
    out, lse = sparse_attention(**arguments, out=place)
    assert out is place
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


def test_labels() -> None:
    cpu = torch.device("cpu")
    labels = [SPARSE_KERNELS.select(cpu, mode).label for mode in ("float", "fp8_kv")]
    assert labels == [
        "nvfp4_sparse_attention/reference (cpu)",
        "nvfp4_sparse_attention_fp8_kv/reference (cpu)",
    ]


def test_memory_does_not_grow_with_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and keys are processed in blocks of limited size."""
    case, block = LARGE_CASES["many tokens"], sparse_reference.IndexedKeyValues.block
    taken: list[tuple[int, int]] = []

    def spy(self: Any, tiles: Any, start: int, count: int) -> Any:
        taken.append((len(tiles) * case.query_heads, count))
        return block(self, tiles, start, count)

    monkeypatch.setattr(sparse_reference.IndexedKeyValues, "block", spy)
    sparse_attention(**case.problem().sparse())
    assert len(taken) > 2
    assert max(rows for rows, _ in taken) <= reference.ROWS
    assert max(keys for _, keys in taken) <= reference.BLOCK


# --- compilation ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mixed", "fp8 everything"])
def test_opcheck(name: str) -> None:
    op, arguments = torch.ops.nvfp4.sparse_attention, CASES[name].problem().sparse()
    check_op(op.default, positional(op.default, arguments))
    into = torch.ops.nvfp4.sparse_attention_into.default
    check_op(into, positional(into, arguments | {"out": torch.empty_like(arguments["q"])}))


def test_compiled() -> None:
    # torch.compile would take sizes that are equal in one call for the same symbol.
    cases = [
        SparseCase((n, 1), (50, 9), head_dim=32, sinks=True, listed=(*[n] * n, 7), width=n)
        for n in (21, 27)
    ]
    arguments = [case.problem().sparse() for case in cases]
    tensors = [{n: x for n, x in given.items() if isinstance(x, Tensor)} for given in arguments]

    def layer(**given: Tensor) -> Result:
        return sparse_attention(**given, soft_cap=3.0)

    check_compiled(layer, [((), given) for given in tensors], graphs=1)
