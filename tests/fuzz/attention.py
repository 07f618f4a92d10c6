"""Attention: dense and ragged, paged, to NVFP4, and to the keys on a list."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nvfp4_kernels import paged_attention
from nvfp4_kernels.nvfp4 import from_blocked
from tests.fuzz.bounds import SMALLEST, ULP, near, quantized, row_there, same
from tests.fuzz.draw import BF16, E4M3, FP16, FP32, Draw
from tests.fuzz.ops import Given, Op
from tests.fuzz.wrong import copied
from tests.test_kernels import oracle
from tests.test_kernels.attention.attention_sm100 import E4M3_HALF_ULP, EXP2_ERROR
from tests.test_kernels.oracle import Float64, float64

INT32 = torch.int32
NO_PAGE = 1 << 30  # nobody may look for it


# --- drawing --------------------------------------------------------------------------------------


def draw_heads(draw: Draw) -> tuple[int, int, int]:
    """Heads of queries and of keys, and D."""
    heads = draw.number(1, 3)
    return (
        heads * draw.one(1, 2, 4),
        heads,
        draw.one(64, 128) if draw.gpu else 16 * draw.number(1, 16),
    )


def draw_scoring(draw: Draw, query_heads: int, windows: bool = True) -> Given:
    given: Given = {"scale": draw.one(None, None, 0.2, 1.5)}
    if draw.chance(0.3):
        given["soft_cap"] = draw.one(0.5, 3.0, 30.0)
    if windows and draw.chance(0.4):
        given["window"] = draw.one(1, 2, 7, 16, 33, 1000)
    if draw.chance(0.3):
        given["sinks"] = draw.floats((query_heads,), FP32, 1)
    return given


def starts(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(INT32)


def draw_attention(draw: Draw) -> Given:
    query_heads, heads, dim = draw_heads(draw)
    dtype, causal = draw.one(BF16, FP16), draw.chance(0.6)
    scoring = draw_scoring(draw, query_heads, windows=causal) | {"causal": causal}
    most = 20 if draw.gpu else 40
    if draw.chance(0.5):
        sizes = draw.number(0, 3), draw.number(0, 9), draw.number(0, most)
        q = draw.floats((*sizes[:2], query_heads, dim), dtype, 1)
        k, v = (draw.floats((sizes[0], sizes[2], heads, dim), dtype, 1) for _ in range(2))
        return {"q": draw.heads(q), "k": draw.heads(k), "v": draw.heads(v)} | scoring
    count = draw.number(0, 3)
    queries, keys = draw.lengths(count, 0, 9), draw.lengths(count, 0, most)
    spare = draw.one(0, 0, 2)
    q = draw.floats((sum(queries) + spare, query_heads, dim), dtype, 1)
    k, v = (draw.floats((sum(keys) + spare, heads, dim), dtype, 1) for _ in range(2))
    return {
        "q": draw.heads(q), "k": draw.heads(k), "v": draw.heads(v),
        "query_start": starts(queries), "key_start": starts(keys),
        "max_query_len": max(queries, default=0) + draw.one(0, 3),
        "max_key_len": max(keys, default=0) + draw.one(0, 9),
    } | scoring  # fmt: skip


@dataclass(frozen=True)
class Pages:
    """A paged cache, and which pages and slots its sequences have."""

    cache: Tensor
    table: Tensor
    size: int
    scales: Given

    def slot(self, sequence: int, key: int) -> int:
        return int(self.table[sequence, key // self.size]) * self.size + key % self.size


def draw_pages(
    draw: Draw, keys: Sequence[int], heads: int, dim: int, dtype: torch.dtype, fp8: bool, size: int
) -> Pages:
    """Keys in shuffled pages, NaN where no key is; heads before tokens, or after, or of a layer."""
    counts = [-(-n // size) for n in keys]
    order = torch.from_numpy(draw.rng.permutation(sum(counts) + 2))
    shape = len(order), draw.one(1, 1, 2), size, heads, 2 * dim
    cache = draw.floats(shape, FP32, 1).to(E4M3 if fp8 else dtype)
    table = torch.full((len(keys), max(counts, default=0) + draw.one(0, 2)), NO_PAGE, dtype=INT32)
    used = 0
    for sequence, (n, pages) in enumerate(zip(keys, counts, strict=True)):
        table[sequence, :pages] = order[used : used + pages]
        used += pages
        if n % size:
            cache[order[used - 1], :, n % size :] = math.nan
    cache[order[used:]] = math.nan
    layer = cache[:, -1].transpose(1, 2)
    scales: Given = {}
    if fp8:
        scales = {f"{x}_scale": torch.tensor(draw.rng.uniform(0.1, 2), dtype=FP32) for x in "kv"}
    return Pages(layer if draw.chance(0.5) else layer.contiguous(), table, size, scales)


def draw_page_size(draw: Draw) -> int:
    return draw.one(16, 32) if draw.gpu else draw.one(1, 3, 8, 16, 16, 32)


def draw_paged(draw: Draw) -> Given:
    query_heads, heads, dim = draw_heads(draw)
    dtype, fp8, size = draw.one(BF16, FP16), draw.chance(0.3), draw_page_size(draw)
    count = draw.number(0, 4)
    queries, keys = draw.lengths(count, 0, draw.one(1, 9)), draw.lengths(count, 0, 60)
    pages = draw_pages(draw, keys, heads, dim, dtype, fp8, size)
    q = draw.floats((sum(queries) + draw.one(0, 0, 2), query_heads, dim), dtype, 1)
    scoring, longest = draw_scoring(draw, query_heads), max(keys, default=0)
    if "window" not in scoring:
        scoring["causal"] = draw.chance(0.8)
    given = {
        "q": draw.heads(q), "kv_cache": pages.cache, "block_table": pages.table,
        "seq_lens": torch.tensor(keys, dtype=INT32), "query_start": starts(queries),
        "max_query_len": max(queries, default=0) + draw.one(0, 3),
        "max_seq_len": min(longest + draw.one(0, 9), pages.table.shape[1] * size),
    } | pages.scales | scoring  # fmt: skip
    if draw.chance(0.2):
        given["counters"] = torch.zeros(count * heads + draw.one(0, 5), dtype=INT32)
    if draw.chance(0.2):
        given["out"] = torch.full(q.shape, math.nan, dtype=dtype)
    return given


def draw_paged_quantized(draw: Draw) -> Given:
    while True:
        given = draw_paged(draw)
        _, heads, dim = given["q"].shape
        if dim % 32 == 0 and heads * dim % 64 == 0:
            break
    given.pop("out", None)
    given["input_scale"] = draw.scalar(0.001)
    if draw.chance(0.3):
        rows, first = len(given["q"]), draw.one(0, 3, 130)
        tiles = -(-(first + rows + draw.one(0, 40)) // 128)
        data = torch.full((rows, heads, dim // 2), 7, dtype=torch.uint8)
        scales = torch.full((tiles, heads * dim // 64, 32, 16), 5, dtype=torch.uint8).view(E4M3)
        given |= {"out": (data, scales), "first_row": first}
    return given


def draw_sparse(draw: Draw) -> Given:
    query_heads, heads, dim = draw_heads(draw)
    dtype, fp8, size = draw.one(BF16, FP16), draw.chance(0.3), draw_page_size(draw)
    count = draw.number(0, 3)
    queries, keys = draw.lengths(count, 0, 4), draw.lengths(count, 0, 60)
    pages = draw_pages(draw, keys, heads, dim, dtype, fp8, size)
    rows, width = sum(queries), draw.number(0, 30)
    q = draw.floats((rows, query_heads, dim), dtype, 1)
    indices = torch.full((rows, width), draw.one(-1, NO_PAGE), dtype=INT32)
    lens, row = torch.zeros(rows, dtype=INT32), 0
    for asked, there in zip(queries, keys, strict=True):
        for _ in range(asked):
            lens[row] = draw.number(0, width) if there else 0
            listed = draw.rng.integers(0, max(1, there), int(lens[row]))  # some come twice
            indices[row, : int(lens[row])] = torch.from_numpy(listed).to(INT32)
            row += 1
    given = {
        "q": draw.heads(q), "kv_cache": pages.cache, "indices": indices, "lens": lens,
        "block_table": pages.table, "query_start": starts(queries),
    } | pages.scales | draw_scoring(draw, query_heads, windows=False)  # fmt: skip
    if draw.chance(0.2):
        given["out"] = torch.full(q.shape, math.nan, dtype=dtype)
    return given


# --- the formula ----------------------------------------------------------------------------------

Row = tuple[tuple[int, ...], Float64, Float64, Float64]  # its index, q, keys and values it sees


def check_rows(
    given: Given,
    out: Tensor | None,
    lse: Tensor | None,
    rows: Iterator[Row],
    kernel: bool = False,
) -> None:
    """Softmax in float64, one query after the other, against ``out`` and ``lse``, if any.

    The sm_100 kernel rounds weights to 16 bits, and with an E4M3 cache queries, with a scale for
    each, and weights to E4M3, whose exponentials are coarser. Weights far below the largest are
    subnormal there, or zero.
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
                value = value * float(scale_of_values)  # 0 times it, where no key is seen
            near(f"out{at}", out[index][head], value, (2 * off + weight + 1e-5) * spread + lost)


def in_e4m3(q: Float64) -> Float64:
    """Queries as the kernel rounds them, with a scale per row."""
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
    """The first key that a query at ``position`` sees, and the one after the last."""
    end = min(keys, position + 1) if given.get("causal", True) else keys
    window = given.get("window")
    begin = 0 if window is None else max(0, position - window + 1)
    return begin, max(begin, end)


def stored(given: Given, sequence: int, positions: Sequence[int]) -> tuple[Float64, Float64]:
    """Keys and values at positions of a sequence, ``(n, Hkv, D)``, as the cache holds them."""
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
    """Rows of all sequences but those with a NaN among their keys, which ops say nothing of."""
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


def _check_memory(given: Given, out: Any, after: Given) -> None:
    """What was given to be written was written, and counters are zero again."""
    if after.get("out") is not None:
        assert out.data_ptr() == after["out"].data_ptr()
    if given.get("counters") is not None:
        same("counters", after["counters"], given["counters"])


def check_paged(given: Given, result: Any, after: Given, kernel: bool = False) -> None:
    check_rows(given, *result, paged_rows(given), kernel)
    _check_memory(given, result[0], after)


def check_sparse(given: Given, result: Any, after: Given, kernel: bool = False) -> None:
    check_rows(given, *result, sparse_rows(given), kernel)
    _check_memory(given, result[0], after)


def check_paged_quantized(given: Given, result: Any, after: Given, kernel: bool = False) -> None:
    """The bits that quantising ``paged_attention`` gives; other rows' scales stay as they were."""
    data, scales, lse = result
    check_rows(given, None, lse, paged_rows(given), kernel)
    plain = {n: x for n, x in given.items() if n not in ("out", "input_scale", "first_row")}
    values, _ = paged_attention(**copied(plain))
    check_nvfp4_rows(given, data, scales, values)


def check_nvfp4_rows(given: Given, data: Tensor, scales: Tensor, values: Tensor) -> None:
    """``values`` ``(T, H, D)`` in rows of an operand, those of all sequences."""
    rows, first = int(given["query_start"][-1]), given.get("first_row", 0)
    flat = float64(values[:rows].flatten(1))
    linear = from_blocked(scales, scales.shape[0] * 128, flat.shape[1] // 16)
    mine = oracle.blocked(linear[first : first + rows])
    quantized(data[:rows].flatten(1), mine, flat, flat, given["input_scale"], 1)
    if isinstance(given.get("out"), tuple):
        before = from_blocked(given["out"][1], scales.shape[0] * 128, flat.shape[1] // 16)
        for part in (slice(0, first), slice(first + len(given["q"]), None)):
            same("other rows' scales", linear[part], before[part])


OPS = {
    "attention": Op(
        draw_attention, check_attention, kernel_check=partial(check_attention, kernel=True)
    ),
    "paged_attention": Op(draw_paged, check_paged, kernel_check=partial(check_paged, kernel=True)),
    "paged_attention_quantized": Op(
        draw_paged_quantized,
        check_paged_quantized,
        kernel_check=partial(check_paged_quantized, kernel=True),
    ),
    "sparse_attention": Op(
        draw_sparse, check_sparse, kernel_check=partial(check_sparse, kernel=True)
    ),
}
