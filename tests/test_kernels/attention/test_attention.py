"""``attention`` and ``paged_attention`` on CPU, against the formula in float64."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nvfp4_kernels import attention, paged_attention
from nvfp4_kernels.attention import reference
from nvfp4_kernels.attention.kernels import PAGED_KERNELS
from tests.test_kernels.attention.attention_cases import (
    BF16,
    CASES,
    EVERY_CASE,
    EVERY_LARGE_CASE,
    LARGE_CASES,
    NO_PAGE,
    UNSEEN,
    Case,
    Problem,
    unseen,
    with_pages_of_nan,
)
from tests.test_kernels.compilation import check_compiled, check_op
from tests.test_kernels.strategies import PROPERTY

SIXTEEN_BIT = [name for name, case in CASES.items() if not case.fp8]
UNIFORM = [name for name in SIXTEEN_BIT if CASES[name].uniform]


def check(found: tuple[Tensor, Tensor], problem: Problem) -> None:
    """Check within one rounding of ``out`` to its dtype and float32's errors before it.

    Values lie within ±5. Products of up to 256 elements, logits up to 30 and sums of up to 1300
    weights have a relative error of some 2⁻²⁴ for each addition, unless terms cancel: 1e-5 in all
    is ten times the observed error.
    """
    out, lse = found
    expected, log = problem.formula()
    assert out.dtype == problem.q.dtype
    assert lse.dtype == torch.float32
    half_ulp = torch.finfo(out.dtype).eps / 2
    out, lse = out.double().view(expected.shape), lse.double().view(log.shape)
    torch.testing.assert_close(out, expected, rtol=half_ulp, atol=1e-5)
    torch.testing.assert_close(lse, log, rtol=1e-6, atol=1e-5)


@EVERY_CASE
def test_paged(case: Case) -> None:
    problem = case.problem()
    check(paged_attention(**problem.paged()), problem)


@pytest.mark.parametrize("name", SIXTEEN_BIT)
def test_ragged(name: str) -> None:
    problem = CASES[name].problem()
    check(attention(**problem.ragged()), problem)


@pytest.mark.parametrize("name", UNIFORM)
def test_dense(name: str) -> None:
    problem = CASES[name].problem()
    arguments = problem.dense()
    out, lse = attention(**arguments)
    assert out.shape == arguments["q"].shape
    assert lse.shape == arguments["q"].shape[:-1]
    check((out, lse), problem)


@EVERY_LARGE_CASE
def test_large(case: Case) -> None:
    """Cases of more than one query tile and more than one block of keys."""
    problem = case.problem()
    check(paged_attention(**problem.paged()), problem)
    if not case.fp8:
        check(attention(**problem.ragged()), problem)


lengths = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 60)), max_size=5)


@PROPERTY
@given(
    lengths,
    st.sampled_from([(2, 2), (6, 2), (3, 1)]),
    st.sampled_from([1, 8, 16, 24, 64]),
    st.booleans(),
    st.none() | st.integers(1, 70),
    st.booleans(),
    st.booleans(),
)
def test_any_sequences(
    sequences: list[tuple[int, int]],
    heads: tuple[int, int],
    page_size: int,
    causal: bool,
    window: int | None,
    sinks: bool,
    fp8: bool,
) -> None:
    queries, keys = (tuple(x) for x in zip(*sequences, strict=True)) if sequences else ((), ())
    case = Case(
        queries, keys, *heads, head_dim=16, page_size=page_size, fp8=fp8, by_token=sinks,
        causal=causal, window=window if causal else None, sinks=sinks,
    )  # fmt: skip
    problem = case.problem()
    check(paged_attention(**problem.paged()), problem)


# --- layouts ----------------------------------------------------------------------------------


def test_garbage_does_not_matter() -> None:
    for name in ("everything", "fp8 everything"):
        problem = CASES[name].problem()
        results = []
        for garbage in (0.0, math.nan, 448.0):
            torch.manual_seed(1)
            results.append(paged_attention(**problem.paged(garbage)))
        for result in results[1:]:
            assert torch.equal(result[0], results[0][0])
            assert torch.equal(result[1], results[0][1])


def test_keys_out_of_every_window_do_not_matter() -> None:
    """Pages before the window, which vLLM frees, are never read."""
    problem = Case((1, 3), (100, 64), window=20).problem()
    arguments = problem.paged()
    arguments["block_table"][0, : (100 - 20) // 16] = NO_PAGE
    arguments["block_table"][1, : (64 - 2 - 20) // 16] = NO_PAGE
    check(paged_attention(**arguments), problem)


def test_nan_out_of_every_window_does_not_matter() -> None:
    """Freed pages before the window may hold NaN of another sequence."""
    for fp8 in (False, True):
        problem = Case((1, 3), (100, 64), window=20, fp8=fp8).problem()
        arguments = problem.paged()
        expected = paged_attention(**arguments)
        cache, table = arguments["kv_cache"], arguments["block_table"]
        cache = torch.cat([torch.full_like(cache[:1], math.nan), cache])
        table += 1
        for sequence, hidden in enumerate((100 - 20, 64 - 2 - 20)):
            page, inside = divmod(hidden, 16)
            table[sequence, :page] = 0
            cache[table[sequence, page], :, :inside] = math.nan
        found = paged_attention(**arguments | {"kv_cache": cache, "block_table": table})
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("case", UNSEEN.values(), ids=UNSEEN)
def test_pages_of_nan_do_not_matter(case: Case) -> None:
    problem = unseen(case)
    found = paged_attention(**with_pages_of_nan(problem.paged(), case))
    check(found, problem)
    for x, expected in zip(found, paged_attention(**problem.paged(0.0)), strict=True):
        assert torch.equal(x, expected)


def test_sinks_of_minus_infinity_are_none() -> None:
    """A sink of −inf, as padded heads have under tensor parallelism, changes nothing."""
    problem = Case((1, 3, 2), (40, 3, 0), sinks=True).problem()
    arguments = problem.paged()
    without = paged_attention(**arguments | {"sinks": None})
    sinks = torch.full_like(arguments["sinks"], -math.inf)
    found = paged_attention(**arguments | {"sinks": sinks})
    assert not found[0].isnan().any()
    assert torch.equal(found[0], without[0])
    assert torch.equal(found[1], without[1])
    mixed = arguments["sinks"].clone()
    mixed[0] = -math.inf
    out, lse = paged_attention(**arguments | {"sinks": mixed})
    assert torch.equal(out[:, 0], without[0][:, 0])
    assert torch.equal(lse[:, 0], without[1][:, 0])


def test_strides() -> None:
    """Strided views: q as a slice of a qkv projection, the cache of one layer among several."""
    problem = CASES["mixed"].problem()
    arguments = problem.paged()
    expected = paged_attention(**arguments)
    q, cache = arguments["q"], arguments["kv_cache"]
    projected = torch.full((len(q), 8, 64), math.nan, dtype=BF16)
    projected[:, 2:6] = q
    layers = torch.full((len(cache), 3, *cache.shape[1:]), math.nan, dtype=BF16)
    layers[:, 1] = cache
    by_head = q.transpose(0, 1).contiguous().transpose(0, 1)
    for changed in ({"q": projected[:, 2:6]}, {"q": by_head}, {"kv_cache": layers[:, 1]}):
        found = paged_attention(**arguments | changed)
        assert found[0].is_contiguous()
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


def test_dense_strides() -> None:
    problem = CASES["prefill of two"].problem()
    arguments = problem.dense()
    expected = attention(**arguments)
    both = torch.cat([arguments["k"], arguments["v"]], -1)
    by_head = arguments["k"].transpose(1, 2).contiguous().transpose(1, 2)
    for changed in ({"k": both[..., :64], "v": both[..., 64:]}, {"k": by_head}):
        assert torch.equal(attention(**arguments | changed)[0], expected[0])


def test_rows_after_the_last_sequence() -> None:
    """Rows of a padded batch after the last sequence get the result of rows without keys."""
    problem = CASES["mixed"].problem()
    arguments = problem.paged()
    arguments["q"] = torch.cat([problem.q, torch.full_like(problem.q[:5], math.nan)])
    out, lse = paged_attention(**arguments)
    assert len(out) == len(lse) == len(problem.q) + 5
    check((out[:-5], lse[:-5]), problem)


def test_queries_of_large_logits() -> None:
    """Large logits: the sum of exponentials overflows float32, its logarithm does not."""
    case = replace(CASES["mixed"], scale=20.0)
    problem = case.problem()
    out, lse = paged_attention(**problem.paged())
    _, log = problem.formula()
    assert log.isfinite().all()
    assert log.max() > 88.8
    torch.testing.assert_close(lse.double(), log, rtol=1e-6, atol=1e-5)
    assert out.isfinite().all()


def test_ends_of_sinks() -> None:
    """A sink of −inf is no sink; a very large sink takes all the weight."""
    problem = CASES["mixed"].problem()
    arguments = problem.paged()
    none = paged_attention(**arguments)
    sinks = torch.full((4,), -torch.inf)
    for ours, expected in zip(paged_attention(**arguments | {"sinks": sinks}), none, strict=True):
        assert torch.equal(ours, expected)
    out, lse = paged_attention(**arguments | {"sinks": torch.full((4,), 1e4)})
    assert not out.any()
    assert (lse == 1e4).all()


def test_labels() -> None:
    cpu = torch.device("cpu")
    labels = [PAGED_KERNELS.select(cpu, mode).label for mode in ("float", "fp8_kv")]
    assert labels == [
        "nvfp4_paged_attention/reference (cpu)",
        "nvfp4_paged_attention_fp8_kv/reference (cpu)",
    ]


# --- compilation ------------------------------------------------------------------------------


def positional(op: Any, arguments: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(arguments.get(argument.name) for argument in op._schema.arguments)


@pytest.mark.parametrize("name", ["mixed", "fp8 everything"])
def test_opcheck_paged(name: str) -> None:
    op = torch.ops.nvfp4.paged_attention.default
    check_op(op, positional(op, CASES[name].problem().paged()))


def test_opcheck() -> None:
    op, problem = torch.ops.nvfp4.attention.default, CASES["prefill of two"].problem()
    check_op(op, positional(op, problem.dense()))
    check_op(op, positional(op, problem.ragged()))


def test_compiled() -> None:
    # torch.compile would take sizes that are equal in one call for the same symbol.
    cases = [Case((n, 1), (n, 9), head_dim=32, sinks=True) for n in (33, 47)]
    arguments = [case.problem().paged() for case in cases]
    tensors = [{n: x for n, x in given.items() if isinstance(x, Tensor)} for given in arguments]

    def layer(**given: Tensor) -> tuple[Tensor, Tensor]:
        return paged_attention(**given, max_query_len=47, max_seq_len=64, window=9, soft_cap=3.0)

    check_compiled(layer, [((), given) for given in tensors], graphs=1)


def test_memory_does_not_grow_with_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and keys are processed in blocks of limited size."""
    case, block = Case((150, 1), (700, 600), query_heads=8), reference.PagedKeyValues.block
    taken: list[tuple[int, int]] = []

    def spy(self: Any, tiles: Any, start: int, count: int) -> Any:
        taken.append((sum(t.rows for t in tiles) * case.query_heads, count))
        return block(self, tiles, start, count)

    monkeypatch.setattr(reference.PagedKeyValues, "block", spy)
    paged_attention(**case.problem().paged())
    assert len(taken) > 4  # two blocks for each of three tiles, unless tiles share blocks
    assert max(rows for rows, _ in taken) <= reference.ROWS
    assert max(keys for _, keys in taken) <= reference.BLOCK


def test_large_cases_are_larger_than_a_tile() -> None:
    cases = LARGE_CASES.values()
    assert sum(max(c.keys) > reference.BLOCK for c in cases) > 2
    assert any(max(c.queries) * c.query_heads > reference.ROWS for c in cases)


def test_out() -> None:
    arguments = CASES["mixed"].problem().paged()
    expected, expected_lse = paged_attention(**arguments)
    place = torch.full_like(expected, math.nan)
    out, lse = paged_attention(**arguments, out=place)
    assert out is place
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
