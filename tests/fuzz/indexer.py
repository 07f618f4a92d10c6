"""Ops of the indexer: vectors, their paged cache, scores of keys, and top-k."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nvfp4_kernels import IndexerKeys, IndexerPagedKeys
from tests.fuzz.bounds import SMALLEST, ULP, near, require, row_there, same
from tests.fuzz.draw import BF16, FP32, Draw
from tests.fuzz.ops import Given, Op
from tests.test_kernels.indexer.indexer_oracle import (
    FORMATS,
    KEY_BYTES,
    any_values,
    best,
    dequantize,
    grid,
    padded,
    quantize,
    write_page,
)
from tests.test_kernels.oracle import Float64, float64

INT32 = torch.int32
NO_PAGE = 1 << 30
DATA_DTYPE = {"bf16": BF16, "fp8": torch.float8_e4m3fn}
SCALE_DTYPE = {"nvfp4": torch.float8_e4m3fn, "mxfp4": torch.float8_e8m0fnu, "fp8": FP32}


# --- vectors and their cache ----------------------------------------------------------------------


def _format(draw: Draw) -> Given:
    fmt = draw.one(*FORMATS)
    scale = torch.tensor(draw.rng.uniform(1e-3, 1e-2), dtype=FP32) if fmt == "nvfp4" else None
    return {"fmt": fmt, "global_scale": scale}


def _dim(draw: Draw) -> int:
    return draw.one(64, 128) if draw.gpu else 32 * draw.number(1, 8)


def draw_quantize_q(draw: Draw) -> Given:
    q = draw.floats((draw.number(0, 5), draw.number(1, 4), _dim(draw)), BF16, 6)
    return {"q": draw.heads(q)} | _format(draw)


def check_quantize_q(given: Given, result: Any, after: Given) -> None:
    _same_vectors(given, *result, given["q"])


def _same_vectors(given: Given, data: Tensor, scales: Tensor | None, x: Tensor) -> None:
    if not x.numel():
        require(len(data) == len(x), "data: has another number of vectors")
        return
    scale = given.get("global_scale")
    expected = quantize(given["fmt"], x.contiguous(), 1.0 if scale is None else float(scale))
    wide = float64(x)
    known = np.isfinite(wide).all(-1)  # NaN and infinity show differently by format
    require((expected.scales is None) == (scales is None), "scales: are there, or are not")
    parts = [(data, expected.data)] + ([] if scales is None else [(scales, expected.scales)])
    for found, right in parts:
        same("data or scales", found[torch.from_numpy(known)], right[torch.from_numpy(known)])


def _cache(draw: Draw, pages: int, page_bytes: int) -> Tensor:
    gap = draw.one(0, 0, 16, 64 if draw.gpu else 5)
    cache = torch.full((pages, page_bytes + gap), 0xFF, dtype=torch.uint8)
    return cache[:, :page_bytes]


def _page_bytes(fmt: str, dim: int, size: int) -> int:
    return size * sum(KEY_BYTES[fmt](dim))


def draw_store_k(draw: Draw) -> Given:
    how, dim, size = _format(draw), _dim(draw), draw.one(16, 32) if draw.gpu else draw.number(1, 20)
    pages = draw.number(1, 4)
    places = torch.from_numpy(draw.rng.permutation(pages * size)[: draw.number(0, 9)])
    places[torch.from_numpy(draw.rng.random(len(places)) < 0.3)] = -1
    k = draw.rows(draw.floats((len(places), dim), BF16, 6))
    cache = _cache(draw, pages, _page_bytes(how["fmt"], dim, size))
    return {"k": k, "cache": cache, "slot_mapping": places, "block_size": size} | how


def check_store_k(given: Given, result: Any, after: Given) -> None:
    cache, size, scale = given["cache"].clone(), given["block_size"], given["global_scale"]
    factor = 1.0 if scale is None else float(scale)
    sizes = KEY_BYTES[given["fmt"]](given["k"].shape[1])
    for token, slot in enumerate(given["slot_mapping"].tolist()):
        if slot < 0:
            continue
        page, row = divmod(slot, size)
        if not given["k"][token].isfinite().all():
            cache[page] = after["cache"][page]
            continue
        vector = quantize(given["fmt"], given["k"][token : token + 1].contiguous(), factor)
        cache[page, row * sizes[0] :][: sizes[0]] = vector.data[0].reshape(-1).view(torch.uint8)
        if vector.scales is not None:
            start = size * sizes[0] + row * sizes[1]
            cache[page, start : start + sizes[1]] = vector.scales[0].reshape(-1).view(torch.uint8)
    same("cache", after["cache"], cache)


def _key(given: Given, b: int, key: int, dim: int) -> tuple[Tensor, Tensor | None]:
    """Data and scales of one key, in the byte layout of the cache."""
    fmt, size = given["fmt"], given["block_size"]
    data_bytes, scale_bytes = KEY_BYTES[fmt](dim)
    number, at = int(given["block_table"][b, key // size]), key % size
    page = row_there("block_table", given["cache"], number)
    data = page[at * data_bytes :][:data_bytes].clone().view(DATA_DTYPE.get(fmt, torch.uint8))
    if not scale_bytes:
        return data, None
    start = size * data_bytes + at * scale_bytes
    scales = page[start : start + scale_bytes].clone().view(SCALE_DTYPE[fmt])
    return data, scales.squeeze(0) if fmt == "fp8" else scales


def _filled(draw: Draw, fmt: str, make: Callable[..., Any], keys: list[int], dim: int) -> Given:
    """Cache with keys in shuffled pages, and its block table."""
    size = draw.one(16, 32) if draw.gpu else draw.number(1, 20)
    counts = [-(-n // size) for n in keys]
    order = draw.rng.permutation(sum(counts) + 2).tolist()
    cache = _cache(draw, len(order), _page_bytes(fmt, dim, size))
    table = torch.full((len(keys), max(counts, default=0) + draw.one(0, 2)), NO_PAGE, dtype=INT32)
    for b, (n, count) in enumerate(zip(keys, counts, strict=True)):
        pages = [order.pop() for _ in range(count)]
        table[b, :count] = torch.tensor(pages, dtype=INT32)
        write_page(fmt, make(fmt, draw.rng, n, dim), cache, pages, size)
    return {"cache": cache, "block_table": table, "block_size": size, "fmt": fmt}


def draw_gather_k(draw: Draw) -> Given:
    dim, keys = _dim(draw), draw.lengths(draw.number(0, 4), 0, 40)
    given = _filled(draw, draw.one(*FORMATS), any_values, keys, dim)
    starts = torch.tensor([0, *keys]).cumsum(0).to(INT32)
    total = int(starts[-1]) + draw.one(0, 0, 3)
    return given | {"key_start": starts, "total_keys": total, "head_dim": dim}


def check_gather_k(given: Given, result: Any, after: Given) -> None:
    data, scales = result
    starts = given["key_start"].tolist()
    require(len(data) == given["total_keys"], "data: has another number of keys")
    for b in range(len(starts) - 1):
        for at in range(starts[b], starts[b + 1]):
            expected, factor = _key(given, b, at - starts[b], given["head_dim"])
            same(f"data[{at}]", data[at], expected)
            if factor is not None:
                same(f"scales[{at}]", scales[at], factor)


# --- scores ---------------------------------------------------------------------------------------


def _sizes(draw: Draw) -> tuple[str, Callable[..., Any], int, int]:
    """Format, function that draws values, H and D; in half of the draws, sums are exact."""
    heads = draw.one(8, 16) if draw.gpu else draw.number(1, 12)
    return draw.one(*FORMATS), draw.one(grid, any_values), heads, _dim(draw)


def _weights(draw: Draw, rows: int, heads: int) -> Tensor:
    return draw.integers(-3, 4, (rows, heads), FP32)


def draw_scored(draw: Draw, chooses: bool) -> Given:
    """Arguments of an op that scores contiguous keys or, in half of the draws, paged keys."""
    kind: Any = draw.one(IndexerKeys, IndexerPagedKeys)
    given = (_draw_paged if kind is IndexerPagedKeys else _draw_contiguous)(draw, chooses)
    keys = kind(**{name: given.pop(name) for name in kind._fields})
    return given | {"keys": keys}


def _draw_contiguous(draw: Draw, chooses: bool) -> Given:
    fmt, make, heads, dim = _sizes(draw)
    make = grid if chooses else make  # top-k is judged where scores are exact
    tokens, keys = draw.number(0, 6), draw.number(0, 60)
    q, k = make(fmt, draw.rng, tokens, heads, dim), make(fmt, draw.rng, keys, dim)
    ks = draw.integers(0, keys + 1, (tokens,), INT32)
    ke = torch.from_numpy(draw.rng.integers(ks.numpy(), keys + 1)).to(INT32)
    given: Given = {
        "q": q.data, "q_scales": q.scales, "k": k.data, "k_scales": k.scales,
        "weights": _weights(draw, tokens, heads), "ks": ks, "ke": ke, "fmt": fmt,
    }  # fmt: skip
    if fmt == "fp8" and draw.chance(0.3):
        given["q_scales"] = None
    return given | ({"top_k": draw.number(1, 40)} if chooses else {})


def _draw_paged(draw: Draw, chooses: bool) -> Given:
    fmt, make, heads, dim = _sizes(draw)
    make = grid if chooses else make
    count, next_n = draw.number(0, 4), draw.number(1, 3)
    lens = draw.rng.integers(0, 61, (count, next_n))
    keys = lens.max(1).tolist() if count else []
    given = _filled(draw, fmt, make, keys, dim)
    q = make(fmt, draw.rng, count, next_n, heads, dim)
    given |= {
        "q": q.data, "q_scales": q.scales, "weights": _weights(draw, count * next_n, heads),
        "context_lens": torch.from_numpy(lens).to(INT32).contiguous(),
        "max_context_len": max(keys, default=0) + draw.one(0, 3),
    }  # fmt: skip
    return given | ({"top_k": draw.number(1, 40)} if chooses else {})


def _queries(given: Given) -> Float64:
    """Values of queries ``(rows, H, D)``."""
    q, scales = given["q"], given.get("q_scales")
    if given["fmt"] == "fp8" and scales is None:
        values = float64(q)
    else:
        values = dequantize(given["fmt"], q, scales)
    return values.reshape(-1, *values.shape[-2:])


def _scored(q: Float64, k: Float64, weights: Float64) -> tuple[Float64, Float64]:
    """Scores of keys, and the error bound of float32 sums in any order."""
    products = np.maximum(q @ k.T, 0.0)
    sizes = np.abs(weights) @ (np.abs(q) @ np.abs(k).T)
    adds = q.shape[-1] + q.shape[0] + 8
    return weights @ products, adds * ULP * sizes + SMALLEST


def _rows(given: Given) -> list[tuple[Float64, Float64, int]]:
    """Scores of the visible keys, their errors, and the first key, for each query."""
    given = given | given["keys"]._asdict()
    queries, weights = _queries(given), float64(given["weights"])
    if "context_lens" in given:
        lens, dim = given["context_lens"], queries.shape[-1]
        spans = [(row // lens.shape[1], 0, n) for row, n in enumerate(lens.flatten().tolist())]
        keys = [_paged_keys(given, b, end, dim) for b, _, end in spans]
    else:
        ks, ke = given["ks"].tolist(), given["ke"].tolist()
        values = dequantize(given["fmt"], given["k"], given.get("k_scales"))
        spans = [(0, begin, end) for begin, end in zip(ks, ke, strict=True)]
        keys = [values[begin:end] for _, begin, end in spans]
    return [(*_scored(queries[row], k, weights[row]), spans[row][1]) for row, k in enumerate(keys)]


def _paged_keys(given: Given, b: int, count: int, dim: int) -> Float64:
    if not count or count <= given.get("top_k", 0):
        return np.zeros((count, dim))  # never read
    parts = [_key(given, b, key, dim) for key in range(count)]
    return np.stack([
        dequantize(given["fmt"], data[None], None if scales is None else scales[None])[0]
        for data, scales in parts
    ])  # fmt: skip


def check_logits(given: Given, result: Any, after: Given) -> None:
    for row, (scores, errors, first) in enumerate(_rows(given)):
        near(f"logits[{row}]", result[row, first : first + len(scores)], scores, errors)
        hidden = torch.cat([result[row, :first], result[row, first + len(scores) :]])
        require(bool((hidden == -torch.inf).all()), f"logits[{row}]: −inf must hide other keys")


def check_score_topk(given: Given, result: Any, after: Given) -> None:
    """Check top-k keys: exactly where scores are exact, elsewhere up to rounding."""
    indices, valid = result
    for row, (scores, errors, _) in enumerate(_rows(given)):
        top_k, found = given["top_k"], indices[row].tolist()
        right = padded(best(scores, top_k), top_k)
        require(int(valid[row]) == min(top_k, len(scores)), f"valid[{row}]: {int(valid[row])}")
        swapped = set(found) ^ set(right)
        if swapped:
            require(-1 not in swapped, f"indices[{row}]: {found}, must be {right}")
            near_miss = scores[sorted(swapped)]
            reach = 2 * errors[sorted(swapped)].max()
            off = near_miss.max() - near_miss.min() > reach or bool((scores % 0.25 == 0).all())
            require(not off, f"indices[{row}]: {found}, must be {right}")
        require(found == padded(sorted(i for i in found if i >= 0), top_k), f"order of row {row}")


def draw_topk(draw: Draw) -> Given:
    rows, columns = draw.number(0, 5), draw.number(0, 90)
    logits = draw.floats((rows, columns), FP32, 2)
    kind = torch.from_numpy(draw.rng.random(logits.shape))
    for low, value in zip((0.05, 0.1, 0.15, 0.3), draw.rng.permutation(5)[:4], strict=True):
        logits[kind < low] = (torch.nan, torch.inf, -torch.inf, -0.0, 1.5)[int(value)]
    given: Given = {"logits": draw.rows(logits), "top_k": draw.one(1, 4096, draw.number(1, 60))}
    starts = np.zeros(rows, np.int64)
    if draw.chance(0.4):
        starts = draw.rng.integers(0, columns + 1, rows)
        given["starts"] = torch.from_numpy(starts).to(INT32)
    given["lens"] = torch.from_numpy(draw.rng.integers(0, columns + 1 - starts)).to(INT32)
    return given


def check_topk(given: Given, result: Any, after: Given) -> None:
    (indices, valid), starts, top_k = result, given.get("starts"), given["top_k"]
    for row, count in enumerate(given["lens"].tolist()):
        first = 0 if starts is None else int(starts[row])
        scores = float64(given["logits"][row, first : first + count])
        right = padded(best(scores, top_k), top_k)
        require(indices[row].tolist() == right, f"indices[{row}]: {indices[row].tolist()[:60]}")
        require(int(valid[row]) == min(top_k, count), f"valid[{row}]: {int(valid[row])}")


OPS = {
    "indexer_quantize_q": Op(draw_quantize_q, check_quantize_q),
    "indexer_store_k": Op(draw_store_k, check_store_k),
    "indexer_gather_k": Op(draw_gather_k, check_gather_k),
    "indexer_logits": Op(partial(draw_scored, chooses=False), check_logits),
    "indexer_score_topk": Op(partial(draw_scored, chooses=True), check_score_topk),
    "indexer_topk": Op(draw_topk, check_topk),
}
