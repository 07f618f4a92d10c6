"""Ops that write a paged cache: decode attention, rotary store, rotary attention."""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nvfp4_kernels import HeadRotation, Static, paged_attention, rotary_store
from nvfp4_kernels.attention.kernels import MAX_ROTARY_ROWS
from tests.fuzz.attention import check_memory, check_nvfp4_rows, check_rows, paged_rows
from tests.fuzz.attention_draw import (
    draw_heads,
    draw_longest,
    draw_memory,
    draw_most_keys,
    draw_nvfp4_rows,
    draw_page_size,
    draw_pages,
    draw_queries,
    draw_scoring,
    fits_nvfp4,
    refused,
    starts,
)
from tests.fuzz.bounds import require, rounded, same, within
from tests.fuzz.draw import BF16, FP16, FP32, Draw
from tests.fuzz.ops import Given, Op
from tests.fuzz.rows import Interval, angles_at, draw_angles, rms_norm, rotated
from tests.fuzz.wrong import copied
from tests.test_kernels.oracle import float64

INT32 = torch.int32


# --- decode attention -----------------------------------------------------------------------------


def draw_decode(draw: Draw) -> Given:
    query_heads, heads, dim = draw_heads(draw)
    dtype, size, count = draw.one(BF16, FP16), draw_page_size(draw), draw.number(0, 4)
    keys = draw.lengths(count, 0, 60)
    pages = draw_pages(draw, keys, heads, dim, dtype, False, size)
    q = draw.floats((count, query_heads, dim), dtype, 1)
    key, value = (draw.floats((count, heads, dim), dtype, 1) for _ in range(2))
    slots = [
        pages.slot(b, n - 1) if n and draw.chance(0.8) else -draw.number(1, 5)
        for b, n in enumerate(keys)
    ]
    given = {
        "q": draw.heads(q), "key": draw.heads(key), "value": draw.heads(value),
        "kv_cache": pages.cache, "block_table": pages.table,
        "seq_lens": torch.tensor(keys, dtype=INT32),
        "slot_mapping": torch.tensor(slots, dtype=torch.int64),
    } | draw_scoring(draw, query_heads)  # fmt: skip
    if draw.chance(0.2):
        given["out"] = torch.full(q.shape, torch.nan, dtype=dtype)
    return given


def check_decode(given: Given, result: Any, after: Given) -> None:
    """Check the cache with the new keys; keys without a slot still take part in attention."""
    cache, seen = given["kv_cache"].clone(), given["kv_cache"].clone()
    size = cache.shape[2]
    for b, keys in enumerate(given["seq_lens"].tolist()):
        if not keys:
            continue
        new = torch.cat([given["key"][b], given["value"][b]], -1)
        page, row = int(given["block_table"][b, (keys - 1) // size]), (keys - 1) % size
        seen[page, :, row] = new
        if int(given["slot_mapping"][b]) >= 0:
            cache[page, :, row] = new
    same("kv_cache", after["kv_cache"], cache)
    batch = len(given["q"])
    rows = given | {"kv_cache": seen, "query_start": torch.arange(batch + 1, dtype=INT32)}
    check_rows(rows, result, None, paged_rows(rows))


# --- rotary store ---------------------------------------------------------------------------------


def draw_rotation(draw: Draw, dim: int, dtype: torch.dtype, positions: int) -> Given:
    rotary = 16 * draw.number(1, dim // 16) if draw.gpu else 2 * draw.number(1, dim // 2)
    table = draw_angles(draw, positions, rotary, draw.one(dtype, FP32))
    given: Given = {"cos_sin_cache": table, "neox": draw.chance(0.5)}
    norms, of = draw.one("", "", "q", "k", "qk"), draw.one(dtype, FP32)
    for name in norms:
        given[f"{name}_norm"] = (1 + draw.floats((dim,), FP32, 0) / 4).to(of)
    return given | ({"eps": draw.one(1e-5, 1e-6)} if norms else {})


def draw_rotary_store(draw: Draw) -> Given:
    query_heads, heads, dim = draw_heads(draw)
    dtype, fp8, size = draw.one(BF16, FP16), draw.chance(0.4), draw_page_size(draw)
    tokens, padding, positions = draw.number(0, 6), draw.one(0, 0, 2), draw.number(1, 40)
    pages = draw_pages(draw, [2 * size, size], heads, dim, dtype, fp8, size)
    shapes = (query_heads, heads, heads)
    q, k, v = (draw.floats((tokens + padding, h, dim), dtype, 3) for h in shapes)
    places = torch.from_numpy(draw.rng.permutation(len(pages.cache) * size)[:tokens])
    tokens = len(places)
    places[torch.from_numpy(draw.rng.random(tokens) < 0.3)] = -draw.number(1, 3)
    where = draw.integers(0, positions, q.shape[:1], draw.one(INT32, torch.int64))
    where[tokens:] = 1 << 30
    given = {
        "q": draw.heads(q), "k": draw.heads(k), "v": draw.heads(v), "positions": where,
        "kv_cache": pages.cache, "slot_mapping": places,
    } | draw_rotation(draw, dim, dtype, positions) | pages.scales  # fmt: skip
    if draw.chance(0.2):
        given["out"] = torch.full(q.shape, torch.nan, dtype=dtype)
    return given


def _turned(given: Given, name: str, tokens: int) -> Interval:
    x, norm = float64(given[name][:tokens]), given.get(f"{name}_norm")
    dtype = given["q"].dtype
    low = high = x
    if norm is not None:
        low, high = rms_norm(x, norm, given["eps"], dtype)
    angles = angles_at(given["cos_sin_cache"], given["positions"][:tokens])
    low, high = rotated(low, high, angles, given.get("neox", True))
    return rounded(low, dtype), rounded(high, dtype)


def _stored(ends: Interval, scale: Tensor | None) -> Interval:
    if scale is None:
        return ends
    with np.errstate(all="ignore"):
        low, high = (rounded(end / float64(scale), FP32).clip(-448, 448) for end in ends)
    return np.minimum(low, high), np.maximum(low, high)


def check_rotary_store(given: Given, result: Any, after: Given) -> None:
    slots, cache = given["slot_mapping"].tolist(), given["kv_cache"]
    tokens, size = len(slots), cache.shape[2]
    within("out", result[:tokens], *_turned(given, "q", tokens))
    values = float64(given["v"][:tokens])
    parts = [
        _stored(_turned(given, "k", tokens), given.get("k_scale")),
        _stored((values, values), given.get("v_scale")),
    ]
    low, high = (np.concatenate(ends, -1) for ends in zip(*parts, strict=True))
    found, rest = after["kv_cache"], cache.clone()
    for token, slot in enumerate(slots):
        if slot >= 0 and slot not in slots[token + 1 :]:
            at = slot // size, slice(None), slot % size
            if slots.count(slot) == 1:
                within(f"slot {slot}", found[at], low[token], high[token])
            rest[at] = found[at]
    same("the cache's other slots", found, rest)


# --- rotary attention -----------------------------------------------------------------------------


def draw_rotary_attention(draw: Draw) -> Given:
    query_heads, heads, dim = draw_heads(draw)
    dtype, fp8, size = draw.one(BF16, FP16), draw.chance(0.3), draw_page_size(draw)
    count = draw.number(0, 3)
    group = query_heads // heads
    most_queries = MAX_ROTARY_ROWS // group
    short = min(draw.one(1, 4), most_queries)
    queries = draw_queries(draw, count, group, short, MAX_ROTARY_ROWS)
    older, most_keys = draw_longest(draw, 40), draw_most_keys(draw)
    keys = [n + draw.number(0, older) for n in queries]
    pages = draw_pages(draw, keys, heads, dim, dtype, fp8, size, most_keys)
    rows = sum(queries) + draw.one(0, 0, 2)
    shapes = query_heads, heads, heads
    q, k, v = (draw.floats((rows, h, dim), dtype, 1) for h in shapes)
    positions, slots = torch.zeros(rows, dtype=torch.int64), torch.full((rows,), -1)
    row = 0
    for b, (asked, there) in enumerate(zip(queries, keys, strict=True)):
        for position in range(there - asked, there):
            positions[row], slots[row] = position, pages.slot(b, position)
            row += 1
    how = draw_rotation(draw, dim, dtype, max(keys, default=0) + 1)
    most = min(max(queries, default=0) + draw.one(0, 2), most_queries)
    given: Given = {
        "q": draw.heads(q), "k": draw.heads(k), "v": draw.heads(v), "kv_cache": pages.cache,
        "block_table": pages.table, "seq_lens": torch.tensor(keys, dtype=INT32),
        "query_start": starts(queries), "slot_mapping": slots,
        "positions": positions.to(draw.one(INT32, torch.int64)), "rotation": HeadRotation(**how),
        "max_query_len": most, "max_seq_len": max([most_keys, *keys]),
        "settled": draw.chance(0.3),
    } | pages.scales | draw_scoring(draw, query_heads)  # fmt: skip
    given |= draw_memory(draw, count * heads, most_keys > 0)
    if draw.chance(0.5 if fits_nvfp4(q) else 0.05):
        given |= {"output": Static(draw.scalar(0.001))} | draw_nvfp4_rows(draw, q)
    elif draw.chance(0.2):
        given["out"] = torch.full(q.shape, torch.nan, dtype=dtype)
    return given


def check_rotary_attention(given: Given, result: Any, after: Given, kernel: bool = False) -> None:
    """Check the bits against ``rotary_store`` and ``paged_attention``, fuzzed separately."""
    out, scales, lse = result
    end, how = int(given["query_start"][-1]), given["rotation"]
    parts = {n: x[:end] for n in ("q", "k", "v", "positions") if (x := given[n]) is not None}
    store = parts | {
        "slot_mapping": given["slot_mapping"][:end], "kv_cache": copied(given)["kv_cache"],
        **how._asdict(), "k_scale": given.get("k_scale"), "v_scale": given.get("v_scale"),
    }  # fmt: skip
    before = copied(store)
    turned = rotary_store(**store)
    check_rotary_store(before, turned, store)
    same("kv_cache", after["kv_cache"], store["kv_cache"])
    names = (
        "block_table", "seq_lens", "query_start", "max_query_len", "max_seq_len", "scale", "window",
        "soft_cap", "sinks", "k_scale", "v_scale", "batch_invariant",
    )  # fmt: skip
    paged = {n: given[n] for n in names if n in given}
    paged |= {"q": turned, "kv_cache": store["kv_cache"]}
    expected, expected_lse = paged_attention(**paged)
    same("lse", lse[:end], expected_lse)
    check_rows(paged, expected, expected_lse, paged_rows(paged), kernel)
    if given.get("output") is None:
        require(scales is None, "scales: must be None")
        same("out", out[:end], expected)
    else:
        check_nvfp4_rows(given, out, scales, expected)
    check_memory(given, out, after)


OPS = {
    "decode_attention": Op(draw_decode, check_decode, emulated=False),
    "rotary_store": Op(draw_rotary_store, check_rotary_store),
    "rotary_attention": Op(
        draw_rotary_attention,
        check_rotary_attention,
        kernel_check=partial(check_rotary_attention, kernel=True),
        refused=refused,
    ),
}
