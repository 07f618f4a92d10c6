"""``indexer_topk``: the highest scores of a row, exactly."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nvfp4_kernels import indexer_topk
from nvfp4_kernels.indexer import reference
from tests.test_kernels.indexer.indexer_oracle import best, padded
from tests.test_kernels.strategies import PROPERTY, generators

NAN, INF = math.nan, math.inf
GARBAGE = (NAN, INF, -INF, 3e38)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def check(logits: Tensor, lens: Tensor, top_k: int, starts: Tensor | None = None) -> None:
    indices, valid = indexer_topk(logits, lens, top_k, starts)
    assert indices.dtype == valid.dtype == torch.int32
    firsts = [0] * len(lens) if starts is None else starts.tolist()
    windows = zip(logits.double().numpy(), firsts, lens.tolist(), strict=True)
    expected = [best(row[first : first + length], top_k) for row, first, length in windows]
    assert indices.tolist() == [padded(row, top_k) for row in expected]
    assert valid.tolist() == [len(row) for row in expected]


@pytest.mark.parametrize(
    ("row", "top_k", "expected"),
    [
        ([1.0, 3.0, 2.0], 2, [1, 2]),
        ([5.0, 5.0, 5.0, 5.0], 2, [0, 1]),
        ([1.0, 2.0, 2.0, 3.0, 2.0], 3, [1, 2, 3]),
        ([0.0, -0.0, 0.0], 2, [0, 1]),
        ([-0.0, 0.0, -1.0], 1, [0]),
        ([NAN, 1.0, NAN, 0.0], 2, [1, 3]),
        ([NAN, -INF, NAN, 0.0], 2, [0, 3]),
        ([-INF, NAN, -INF, NAN], 3, [0, 1, 2]),
        ([NAN] * 4, 2, [0, 1]),
        ([-INF] * 4, 3, [0, 1, 2]),
        ([3e38, INF, -INF, INF], 2, [1, 3]),
        ([INF] * 4, 2, [0, 1]),
        ([-3e38, -INF, NAN, -1.0], 2, [0, 3]),
        ([1.0, 1.0 + 2**-23, 1.0 - 2**-24], 1, [1]),
        ([1e-45, 0.0, 1e-44], 2, [0, 2]),
        ([4.0], 1, [0]),
        ([4.0, NAN], 5, [0, 1, -1, -1, -1]),
        ([], 2, [-1, -1]),
    ],
    ids=str,
)
def test_small(row: list[float], top_k: int, expected: list[int]) -> None:
    logits = torch.tensor([row], dtype=torch.float32).view(1, -1)
    indices, valid = indexer_topk(logits, ints(len(row)), top_k)
    assert indices[0].tolist() == expected
    assert valid.tolist() == [min(len(row), top_k)]


@pytest.mark.parametrize("unseen", GARBAGE, ids=str)
def test_what_a_row_does_not_see(unseen: float) -> None:
    logits = torch.full((6, 40), unseen)
    starts, lens = ints(0, 5, 39, 40, 0, 20), ints(40, 0, 1, 0, 9, 12)
    for row, (start, length) in enumerate(zip(starts.tolist(), lens.tolist(), strict=True)):
        logits[row, start : start + length] = torch.randint(-3, 3, (length,)).float()
    check(logits, lens, 7, starts)
    check(logits[[0, 4]], lens[[0, 4]], 7)


def test_nan_at_the_threshold() -> None:
    """Missing finite scores are filled up by the first NaN and −inf of the row."""
    logits = torch.full((1, 64), NAN)
    logits[0, ::3] = -INF
    logits[0, [10, 50, 60]] = ints(1, 2, 3).float()
    check(logits, ints(64), 7)


@pytest.mark.processes
@pytest.mark.parametrize("top_k", [1, 2047, 2048, 4096])
def test_long_rows(top_k: int) -> None:
    logits = torch.randn(3, 131072)
    logits[1] = logits[1].round()  # hundreds of thousands of ties
    logits[2, ::7] = NAN
    check(logits, ints(131072, 131071, 100_000), top_k)


def test_rows_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long rows among short rows, processed a few at a time."""
    monkeypatch.setattr(reference, "SCORES", 100)
    logits = torch.randint(-5, 5, (33, 40)).float()
    check(logits, torch.arange(33, dtype=torch.int32), 10)


def test_rows_apart() -> None:
    logits = torch.randn(4, 60)[:, 10:50]
    check(logits, ints(40, 20, 3, 0), 5)


@pytest.mark.parametrize(("rows", "columns"), [(0, 0), (0, 9), (3, 0)])
def test_empty(rows: int, columns: int) -> None:
    check(torch.zeros(rows, columns), torch.zeros(rows, dtype=torch.int32), 4)


def test_rows_no_longer_than_top_k_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_best", lambda *_: pytest.fail("read"))
    indices, _ = indexer_topk(torch.full((2, 9), NAN), ints(9, 3), 9)
    assert indices.tolist() == [list(range(9)), [0, 1, 2, -1, -1, -1, -1, -1, -1]]


VALUES = st.sampled_from([NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 2.0, 1e-45, 3e38])


@PROPERTY
@given(generators, st.integers(0, 40), st.integers(1, 45), st.lists(VALUES, max_size=6))
def test_any(rng: np.random.Generator, columns: int, top_k: int, special: list[float]) -> None:
    """Few distinct values, hence many ties, and special values."""
    values = np.array([*special, -2.0, 0.5, 1.0, 7.0])
    logits = torch.from_numpy(rng.choice(values, size=(9, columns))).float()
    starts = rng.integers(0, columns + 1, size=9).astype(np.int32)
    lens = rng.integers(0, columns - starts + 1).astype(np.int32)
    check(logits, torch.from_numpy(lens), top_k, torch.from_numpy(starts))


@PROPERTY
@given(generators, st.integers(1, 200), st.integers(1, 64))
def test_any_bits(rng: np.random.Generator, columns: int, top_k: int) -> None:
    codes = rng.integers(0, 2**32, size=(4, columns), dtype=np.uint32)
    logits = torch.from_numpy(codes.view(np.float32))
    check(logits, torch.full((4,), columns, dtype=torch.int32), top_k)
