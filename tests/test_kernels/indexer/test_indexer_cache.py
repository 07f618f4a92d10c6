"""Quantisation of queries and keys, and the paged cache of keys."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nvfp4_kernels import indexer_gather_k, indexer_quantize_q, indexer_store_k
from tests.test_kernels.bits import bits, check_equal
from tests.test_kernels.indexer.indexer_oracle import (
    FORMATS,
    KEY_BYTES,
    Stored,
    quantize,
    write_page,
)
from tests.test_kernels.strategies import PROPERTY, generators

FMTS = pytest.mark.parametrize("fmt", FORMATS)
GLOBAL_SCALE = 0.0123


def scale_of(fmt: str) -> Tensor | None:
    return torch.tensor(GLOBAL_SCALE) if fmt == "nvfp4" else None


def check_stored(found: tuple[Tensor, Tensor | None], expected: Stored) -> None:
    data, scales = found
    check_equal([data], [expected.data])
    if expected.scales is None:
        assert scales is None
    else:
        assert scales is not None
        check_equal([scales], [expected.scales])


def spread_out(*shape: int) -> Tensor:
    """Vectors with magnitudes octaves apart, some zero elements and some zero blocks."""
    x = torch.randn(*shape) * 2.0 ** torch.randint(-12, 12, (*shape[:-1], 1))
    x[torch.rand(shape) < 0.1] = 0
    blocks = x.unflatten(-1, (-1, 16))
    blocks[torch.rand(blocks.shape[:-1]) < 0.2] = 0
    return x.bfloat16()


@FMTS
@pytest.mark.parametrize(
    "shape", [(5, 8, 128), (3, 64, 32), (2, 1, 256), (0, 8, 64), (4, 0, 64)], ids=str
)
def test_quantize(fmt: str, shape: tuple[int, ...]) -> None:
    q = spread_out(*shape)
    if q.numel():
        check_stored(indexer_quantize_q(q, fmt, scale_of(fmt)), quantize(fmt, q, GLOBAL_SCALE))
    else:
        data, _ = indexer_quantize_q(q, fmt, scale_of(fmt))
        assert data.shape[:2] == shape[:2]


@FMTS
def test_every_maximum(fmt: str) -> None:
    """Each finite bfloat16 as the largest of a block: scales at, above and below powers of two."""
    codes = np.arange(0x7F80, dtype=np.uint16)
    q = torch.zeros(len(codes), 32, dtype=torch.bfloat16)
    q[:, 3] = torch.from_numpy(codes.view(np.int16)).view(torch.bfloat16)
    q[:, 20] = -q[:, 3] / 3
    with np.errstate(over="ignore"):
        expected = quantize(fmt, q.view(-1, 10, 32), GLOBAL_SCALE)
    check_stored(indexer_quantize_q(q.view(-1, 10, 32), fmt, scale_of(fmt)), expected)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_ties_round_to_even(fmt: str) -> None:
    """All sixteenths up to 6, in blocks whose scale is 1."""
    x = torch.arange(-96, 97).float() / 16
    q = torch.full((len(x), 1, 32), 6.0)
    q[:, 0, 4], q[:, 0, 5], q[:, 0, 30] = x, -x, x
    data, _ = indexer_quantize_q(q.bfloat16(), fmt, scale_of(fmt) and torch.tensor(1.0))
    rounded = x.numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    negative = (-x).numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert data[:, 0, 2].tolist() == (rounded | negative << 4).tolist()
    assert (data[:, 0, 15] & 15).tolist() == rounded.tolist()


def test_strides() -> None:
    """Strided views: rows of a larger matrix, with heads in another order."""
    q = spread_out(8, 5, 3 * 64)[:, :, 64:128].transpose(0, 1)
    for fmt in FORMATS:
        expected = quantize(fmt, q.contiguous(), GLOBAL_SCALE)
        check_stored(indexer_quantize_q(q, fmt, scale_of(fmt)), expected)


@pytest.mark.parametrize(
    ("fmt", "scale"), [("nvfp4", 0.0), ("mxfp4", 2.0**-126), ("fp8", 2.0**-22)]
)
def test_zeros(fmt: str, scale: float) -> None:
    found, scales = indexer_quantize_q(
        torch.zeros(1, 1, 32, dtype=torch.bfloat16), fmt, scale_of(fmt)
    )
    assert scales is not None
    assert scales.float().unique().tolist() == [scale]
    assert bits(found).unique().tolist() == [0]


@pytest.mark.parametrize(
    ("fmt", "value", "scale"),
    [
        ("nvfp4", float("nan"), float("nan")),
        ("mxfp4", float("nan"), float("nan")),
        ("fp8", float("nan"), float("nan")),
        ("nvfp4", float("inf"), 448.0),
        ("mxfp4", float("-inf"), 2.0**127),
        ("fp8", float("inf"), float("inf")),
    ],
)
def test_not_finite(fmt: str, value: float, scale: float) -> None:
    """A non-finite value changes its block's scale, and no other."""
    q = torch.ones(2, 1, 64, dtype=torch.bfloat16)
    q[1, 0, 40] = value
    data, scales = indexer_quantize_q(q, fmt, scale_of(fmt))
    assert scales is not None
    found, without = scales.float().view(2, -1), quantize(fmt, q[:1], GLOBAL_SCALE)
    block = 40 * found.shape[1] // 64
    np.testing.assert_equal(found[1, block].item(), scale)
    assert without.scales is not None
    kept = [b for b in range(found.shape[1]) if b != block]
    assert torch.equal(found[1, kept], without.scales.float().view(-1)[kept])
    check_equal([data[:1]], [without.data])


# --- the cache --------------------------------------------------------------------------------


def slots_of(pages: list[int], count: int, block_size: int) -> Tensor:
    return torch.tensor(
        [pages[s // block_size] * block_size + s % block_size for s in range(count)],
        dtype=torch.int64,
    )


def empty_cache(fmt: str, pages: int, block_size: int, head_dim: int, gap: int = 0) -> Tensor:
    page_bytes = block_size * sum(KEY_BYTES[fmt](head_dim))
    return torch.full((pages, page_bytes + gap), 0xA5, dtype=torch.uint8)


@FMTS
@pytest.mark.parametrize(
    ("head_dim", "block_size", "gap"),
    [(128, 64, 0), (128, 1, 0), (32, 16, 0), (64, 7, 0), (96, 16, 3), (256, 3, 64)],
)
def test_store(fmt: str, head_dim: int, block_size: int, gap: int) -> None:
    """Every byte of the cache: keys in their slots, all other bytes as before."""
    k = spread_out(2 * block_size + 1, head_dim)
    pages = [4, 0, 2]
    cache = empty_cache(fmt, 6, block_size, head_dim, gap)
    expected = cache.clone()
    write_page(fmt, quantize(fmt, k, GLOBAL_SCALE), expected, pages, block_size)
    view = cache[:, : cache.shape[1] - gap]
    slots = slots_of(pages, len(k), block_size)
    indexer_store_k(k, view, slots, fmt, block_size, scale_of(fmt))
    assert torch.equal(cache, expected)


@FMTS
def test_skipped_keys(fmt: str) -> None:
    """Slot −1 stores to no slot, in particular not to the last."""
    k = spread_out(5, 64)
    cache = empty_cache(fmt, 2, 4, 64)
    expected = cache.clone()
    kept = quantize(fmt, k[[1, 3]], GLOBAL_SCALE)
    write_page(fmt, kept, expected, [1], 4)
    slots = torch.tensor([-1, 4, -1, 5, -1])
    indexer_store_k(k, cache, slots, fmt, 4, scale_of(fmt))
    assert torch.equal(cache, expected)
    indexer_store_k(k, cache, torch.full((5,), -1), fmt, 4, scale_of(fmt))
    indexer_store_k(k[:0], cache, slots[:0], fmt, 4, scale_of(fmt))
    assert torch.equal(cache, expected)


@FMTS
def test_gather(fmt: str) -> None:
    """Sequences that end in, at and after the end of a page, and an empty one."""
    lens, size = [5, 0, 4, 9, 1], 4
    stored = [quantize(fmt, spread_out(max(1, n), 64), GLOBAL_SCALE) for n in lens]
    cache = empty_cache(fmt, 12, size, 64)
    numbers = torch.randperm(12).tolist()
    table = torch.full((len(lens), 4), 1 << 30, dtype=torch.int32)
    for b, (keys, count) in enumerate(zip(stored, lens, strict=True)):
        pages = [numbers.pop() for _ in range(-(-count // size))]
        table[b, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        if count:
            write_page(fmt, keys, cache, pages, size)
    starts = torch.tensor([0, 5, 5, 9, 18, 19], dtype=torch.int32)
    data, scales = indexer_gather_k(cache, table, starts, 22, 64, fmt, size)
    assert len(data) == 22
    for b, (keys, count) in enumerate(zip(stored, lens, strict=True)):
        rows = slice(starts[b], starts[b] + count)
        check_equal([data[rows]], [keys.data[:count]])
        if keys.scales is not None:
            assert scales is not None
            check_equal([scales[rows]], [keys.scales[:count]])


@FMTS
def test_gather_nothing(fmt: str) -> None:
    cache, zero = empty_cache(fmt, 1, 4, 64), torch.zeros(1, dtype=torch.int32)
    table = torch.zeros(0, 3, dtype=torch.int32)
    data, _ = indexer_gather_k(cache, table, zero, 0, 64, fmt, 4)
    assert len(data) == 0


@PROPERTY
@given(
    generators,
    st.sampled_from(FORMATS),
    st.sampled_from([32, 64, 96, 128]),
    st.integers(1, 9),
    st.lists(st.integers(0, 20), min_size=1, max_size=4),
)
def test_round_trip(
    rng: np.random.Generator, fmt: str, head_dim: int, block_size: int, lens: list[int]
) -> None:
    """Gathered keys equal keys quantised alone, wherever their pages are."""
    counts = [-(-n // block_size) for n in lens]
    numbers = rng.permutation(sum(counts) + 1).tolist()
    cache = empty_cache(fmt, len(numbers), block_size, head_dim)
    table = torch.full((len(lens), max(counts) + 1), -7, dtype=torch.int32)
    k = torch.from_numpy(rng.standard_normal((sum(lens), head_dim))).bfloat16()
    starts = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    slots: list[int] = []
    for b, (n, count) in enumerate(zip(lens, counts, strict=True)):
        pages = [numbers.pop() for _ in range(count)]
        table[b, :count] = torch.tensor(pages, dtype=torch.int32)
        slots += slots_of(pages, n, block_size).tolist()
    order = rng.permutation(len(slots))
    shuffled = torch.tensor(slots, dtype=torch.int64)[order]
    indexer_store_k(k[order], cache, shuffled, fmt, block_size, scale_of(fmt))
    found = indexer_gather_k(
        cache, table, torch.from_numpy(starts), sum(lens), head_dim, fmt, block_size
    )
    alone: Any = indexer_quantize_q(k.unsqueeze(1), fmt, scale_of(fmt))
    check_equal([found[0]], [alone[0].squeeze(1)])
    if alone[1] is not None:
        assert found[1] is not None
        check_equal([found[1]], [alone[1].squeeze(1)])
