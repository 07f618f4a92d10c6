"""Rows of scores, tiles that are too large for small problems, and the oracle."""

from collections.abc import Callable
from importlib import import_module

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from nvfp4_kernels import indexer_topk
from nvfp4_kernels.indexer.topk.tile import TopkTile, bitmap_words
from tests.test_kernels.indexer.indexer_oracle import padded

Row = NDArray[np.float32]
Make = Callable[[np.random.Generator, int], Row]
COLUMNS = 9000  # more than PAIR's buffers hold: a sampled threshold, several rounds of loads

PAIR = TopkTile(threads=256, cluster=2, capacity=2048, words=bitmap_words(COLUMNS, 2, 256))
ALONE = TopkTile(threads=512, cluster=1, capacity=2048, words=bitmap_words(COLUMNS, 1, 512))
EIGHT = TopkTile(threads=256, cluster=8, capacity=1280, words=bitmap_words(20_000, 8, 256))


def some(rng: np.random.Generator, row: Row, value: float) -> Row:
    """``row`` with a tenth of its values replaced by ``value``."""
    return np.where(rng.random(len(row)) < 0.1, np.float32(value), row)


def normal(rng: np.random.Generator, columns: int) -> Row:
    return rng.standard_normal(columns, dtype=np.float32)


def bits(rng: np.random.Generator, columns: int) -> Row:
    """Row of arbitrary float32 bits, NaN of either sign included."""
    return rng.integers(0, 1 << 32, columns, dtype=np.uint32).view(np.float32)


def hot(rng: np.random.Generator, columns: int) -> Row:
    """Row whose highest values are adjacent, so that a sample may miss them."""
    row = normal(rng, columns)
    row[columns // 3 :][: columns // 5] += 10
    return row


def of(*values: float) -> Make:
    """Function that makes a row of values drawn uniformly from ``values``."""
    return lambda rng, columns: rng.choice(np.array(values, dtype=np.float32), columns)


INF, NAN = float("inf"), float("nan")
TINY = float(np.float32(1e-45))
ROWS: dict[str, Make] = {
    "normal": normal,
    "all equal": of(3.0),
    "ascending": lambda rng, n: np.arange(n, dtype=np.float32),
    "descending": lambda rng, n: -np.arange(n, dtype=np.float32),
    "few values": lambda rng, n: normal(rng, n).round(),
    "mostly zero": lambda rng, n: np.maximum(normal(rng, n) - 2, 0),
    "both zeros": of(0.0, -0.0, -1.0),
    "both zeros are the best": of(0.0, -0.0, -TINY),
    "subnormal": of(0.0, -0.0, TINY, -TINY, 2 * TINY, 1e-38),
    "close together": lambda rng, n: (1e4 + normal(rng, n) / 16).astype(np.float32),
    "all negative": lambda rng, n: -np.abs(normal(rng, n)),
    "some NaN": lambda rng, n: some(rng, normal(rng, n), NAN),
    "some infinite": lambda rng, n: some(rng, some(rng, normal(rng, n), INF), -INF),
    "mostly NaN": lambda rng, n: np.where(rng.random(n) < 0.995, np.float32(NAN), normal(rng, n)),
    "mostly -inf": lambda rng, n: np.where(rng.random(n) < 0.99, np.float32(-INF), normal(rng, n)),
    "nothing but NaN and -inf": of(NAN, -INF),
    "nothing but inf": of(INF),
    "largest finite": of(3.4028235e38, INF, -INF, -3.4028235e38),
    "any bits": bits,
    "hot": hot,
}


def use(patch: pytest.MonkeyPatch, tile: TopkTile) -> None:
    """Make the kernel use ``tile`` for any problem; CuTe DSL must be bound to its device."""
    patch.setattr(
        import_module("nvfp4_kernels.indexer.topk.launch"), "choose_config", lambda *_: tile
    )


def rows_of(make: Make, rows: int = 2, columns: int = COLUMNS) -> Tensor:
    rng = np.random.default_rng(7)
    return torch.from_numpy(np.stack([make(rng, columns) for _ in range(rows)]))


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def best(row: Row, top_k: int) -> list[int]:
    """Columns of the highest values, in ascending order; among ties, the first."""
    values = np.where(np.isnan(row), np.float32(-np.inf), row)
    order = np.lexsort((np.arange(len(row)), -values))
    return sorted(order[:top_k].tolist())


def check(
    logits: Tensor,
    lens: Tensor,
    top_k: int,
    device: torch.device,
    starts: Tensor | None = None,
) -> None:
    """Compare the op with the oracle; a view of ``logits`` is a view on the device as well."""
    wide = logits if logits._base is None else logits._base
    there = wide.to(device).as_strided(logits.shape, logits.stride(), logits.storage_offset())
    window = None if starts is None else starts.to(device)
    indices, valid = indexer_topk(there, lens.to(device), top_k, window)
    firsts = [0] * len(lens) if starts is None else starts.tolist()
    for row, (first, length) in enumerate(zip(firsts, lens.tolist(), strict=True)):
        expected = best(logits[row, first : first + length].numpy(), top_k)
        assert indices[row].tolist() == padded(expected, top_k), f"row {row}"
        assert valid[row] == len(expected), f"row {row}"
