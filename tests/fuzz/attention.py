"""Attention ops: dense and ragged, paged, with NVFP4 output, and sparse over top-k indices."""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nvfp4_kernels import paged_attention
from nvfp4_kernels.formats.nvfp4 import from_blocked
from tests.fuzz.attention_draw import (
    draw_attention,
    draw_paged,
    draw_sparse,
    refused,
    refused_sparse,
)
from tests.fuzz.bounds import SMALLEST, ULP, near, quantized, require, row_there, same
from tests.fuzz.draw import FP16
from tests.fuzz.ops import Given, Op
from tests.fuzz.wrong import copied
from tests.test_kernels import oracle
from tests.test_kernels.attention.attention_sm100 import E4M3_HALF_ULP, EXP2_ERROR
from tests.test_kernels.oracle import Float64, float64

Row = tuple[tuple[int, ...], Float64, Float64, Float64]  # index, q, and the visible keys and values


def check_rows(
    given: Given,
    out: Tensor | None,
    lse: Tensor | None,
    rows: Iterator[Row],
    kernel: bool = False,
) -> None:
    """Check ``out`` and ``lse``, if any, against a float64 softmax, one query after the other.

    The sm_100 kernel rounds softmax weights to 16 bits. With an E4M3 cache it rounds queries (one
    scale each) and weights to E4M3, and its exponentials are coarser: weights far below the largest
    are subnormal, or zero.
    """
    fp8 = kernel and given.get("k_scale") is not None
    weight, least, coarse = 0.0, 0.0, EXP2_ERROR[True] if fp8 else 0.0
    if kernel:
        least = 2.0**-16 if fp8 else 2.0**-24 if given["q"].dtype == FP16 else 0.0
        weight = E4M3_HALF_ULP + 2 * coarse if fp8 else torch.finfo(given["q"].dtype).eps / 2
    sinks, cap, scale = (given.get(name) for name in ("sinks", "soft_cap", "scale"))
    for index, given_q, keys, values in rows:
        q = in_e4m3(given_q) if fp8 else given_q
        heads, dim = q.shape
        group = heads // keys.shape[1]
        factor = dim**-0.5 if scale is None else scale
        for head in range(heads):
            k, v = keys[:, head // group], values[:, head // group]
            logits, sizes = k @ q[head] * factor, np.abs(k) @ np.abs(q[head]) * factor
            off = (dim + 8) * ULP / 2 * sizes.max(initial=0)
            if cap is not None:
                logits = cap * np.tanh(logits / cap)
                off = off + 4 * ULP * cap
            more = [] if sinks is None else [float(sinks[head])]
            top = max([*logits, *more], default=-math.inf)
            weights = np.exp(logits - top) if len(logits) else logits
            total = weights.sum() + sum(math.exp(x - top) for x in more if top > -math.inf)
            log = top + math.log(total) if total else -math.inf
            reach = off + coarse + 1e-6 * (4 + (abs(log) if total else 0))
            at = f"{list(index)} head {head}"
            if lse is not None:
                near(f"lse{at}", lse[index][head], np.asarray(log), np.asarray(reach))
            if out is None:
                continue
            shares = weights / total if total else weights
            spread = shares @ np.abs(v) if len(v) else np.zeros(dim)
            value = shares @ v if len(v) else np.zeros(dim)
            lost = least * np.abs(v).sum(0) + SMALLEST
            scale_of_values = given.get("v_scale")
            if scale_of_values is not None and not bool(scale_of_values.isfinite()):
                value = value * float(scale_of_values)  # 0 times the scale if no key is visible
            near(f"out{at}", out[index][head], value, (2 * off + weight + 1e-5) * spread + lost)


def in_e4m3(q: Float64) -> Float64:
    """Queries rounded to E4M3 as in the kernel, with a scale per row."""
    x = q.astype(np.float32)
    largest = np.abs(x).max(-1, keepdims=True)
    scale = np.where(largest > 0, largest * np.float32(1 / 448), np.float32(1))
    codes = np.clip(x * (np.float32(1) / scale), -448, 448)
    return float64(oracle.e4m3(codes)) * scale.astype(np.float64)


def check_attention(given: Given, result: Any, after: Given, kernel: bool = False) -> None:
    q, k, v = (given[name] for name in "qkv")
    if given.get("query_start") is None:
        spans = [(b, 0, q.shape[1], b, 0, k.shape[1]) for b in range(len(q))]
    else:
        ends = [given[name].tolist() for name in ("query_start", "key_start")]
        spans = [
            (None, *ends[0][b : b + 2], None, *ends[1][b : b + 2]) for b in range(len(ends[0]) - 1)
        ]

    def rows() -> Iterator[Row]:
        for b, begin, end, _, first, last in spans:
            keys, values = (float64(x if b is None else x[b])[first:last] for x in (k, v))
            for row in range(begin, end):
                index = (row,) if b is None else (b, row)
                position = last - first - (end - row)
                seen = slice(*seen_keys(given, position, last - first))
                yield index, float64(q[index]), keys[seen], values[seen]

    check_rows(given, *result, rows(), kernel)


def seen_keys(given: Given, position: int, keys: int) -> tuple[int, int]:
    """Range of the keys visible to the query at ``position``: first key, and end (exclusive)."""
    end = min(keys, position + 1) if given.get("causal", True) else keys
    window = given.get("window")
    begin = 0 if window is None else max(0, position - window + 1)
    return begin, max(begin, end)


def stored(given: Given, sequence: int, positions: Sequence[int]) -> tuple[Float64, Float64]:
    """Keys and values, ``(n, Hkv, D)``, at positions of a sequence, as the cache stores them."""
    cache = given["kv_cache"]
    dim, size = cache.shape[-1] // 2, cache.shape[2]
    table = given["block_table"][sequence]
    pages = [
        row_there("block_table", cache, int(row_there("seq_lens", table, p // size)))
        for p in positions
    ]
    rows = [float64(page[:, p % size]) for page, p in zip(pages, positions, strict=True)]
    both = np.stack(rows) if rows else np.zeros((0, cache.shape[1], 2 * dim))
    parts = []
    for name, part in (("k_scale", both[..., :dim]), ("v_scale", both[..., dim:])):
        scale = given.get(name)
        parts.append(part if scale is None else part * float(scale))
    return parts[0], parts[1]


def paged_rows(given: Given) -> Iterator[Row]:
    """Rows of every sequence whose keys have no NaN; results with NaN keys are undefined."""
    ends = given["query_start"].tolist()
    for b, keys in enumerate(given["seq_lens"].tolist()):
        if ends[b] == ends[b + 1]:
            continue
        first, _ = seen_keys(given, keys - (ends[b + 1] - ends[b]), keys)
        if any(np.isnan(part).any() for part in stored(given, b, range(first, keys))):
            continue
        for at in range(ends[b], ends[b + 1]):
            seen = range(*seen_keys(given, keys - (ends[b + 1] - at), keys))
            yield (at,), float64(given["q"][at]), *stored(given, b, seen)


def sparse_rows(given: Given) -> Iterator[Row]:
    ends = given["query_start"].tolist()
    for b in range(len(ends) - 1):
        for at in range(ends[b], ends[b + 1]):
            listed = given["indices"][at, : int(given["lens"][at])].tolist()
            yield (at,), float64(given["q"][at]), *stored(given, b, listed)


def check_memory(given: Given, out: Any, after: Given) -> None:
    """Check that output buffers were written, and that counters are zero again."""
    if after.get("out") is not None:
        memory = after["out"][0] if isinstance(after["out"], tuple) else after["out"]
        require(out.data_ptr() == memory.data_ptr(), "out: is not what was given")
    if given.get("counters") is not None:
        same("counters", after["counters"], given["counters"])


def check_paged(given: Given, result: Any, after: Given, kernel: bool = False) -> None:
    if given.get("output") is not None:
        _check_paged_quantized(given, result, after, kernel)
        return
    check_rows(given, *result, paged_rows(given), kernel)
    check_memory(given, result[0], after)


def check_sparse(given: Given, result: Any, after: Given, kernel: bool = False) -> None:
    check_rows(given, *result, sparse_rows(given), kernel)
    check_memory(given, result[0], after)


def _check_paged_quantized(given: Given, result: Any, after: Given, kernel: bool) -> None:
    """Check for the bits of ``paged_attention``, quantised, and for untouched scales elsewhere."""
    data, scales, lse = result
    check_rows(given, None, lse, paged_rows(given), kernel)
    plain = {n: x for n, x in given.items() if n not in ("out", "output", "first_row")}
    values, _ = paged_attention(**copied(plain))
    check_nvfp4_rows(given, data, scales, values)
    check_memory(given, data, after)


def check_nvfp4_rows(given: Given, data: Tensor, scales: Tensor, values: Tensor) -> None:
    """Check ``values`` ``(T, H, D)`` of all sequences, quantised into rows of an NVFP4 operand."""
    rows, first = int(given["query_start"][-1]), given.get("first_row", 0)
    flat = float64(values[:rows].flatten(1))
    linear = from_blocked(scales, scales.shape[0] * 128, flat.shape[1] // 16)
    mine = oracle.blocked(linear[first : first + rows])
    quantized(data[:rows].flatten(1), mine, flat, flat, given["output"].global_scale, 1)
    if isinstance(given.get("out"), tuple):
        before = from_blocked(given["out"][1], scales.shape[0] * 128, flat.shape[1] // 16)
        for part in (slice(0, first), slice(first + len(given["q"]), None)):
            same("other rows' scales", linear[part], before[part])


OPS = {
    "attention": Op(
        draw_attention,
        check_attention,
        kernel_check=partial(check_attention, kernel=True),
        refused=lambda given, kernel: None,
    ),
    "paged_attention": Op(
        draw_paged,
        check_paged,
        kernel_check=partial(check_paged, kernel=True),
        refused=refused,
    ),
    "sparse_attention": Op(
        draw_sparse,
        check_sparse,
        kernel_check=partial(check_sparse, kernel=True),
        refused=refused_sparse,
    ),
}
