"""Draws for attention: heads, pages, index lists, memory, and arguments that must be refused."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nvfp4_kernels import Static
from tests.fuzz.draw import BF16, E4M3, FP16, FP32, Draw
from tests.fuzz.ops import Given

INT32 = torch.int32
NO_PAGE = 1 << 30  # a page index that no access may use
# Rows of a KV head that fill a unit of the sm_100 kernel, and one row more. The units: rows staged
# at once by warps of a split (8 with an E4M3 cache), rows of a CTA of such warps, a tile.
ROWS = 1, 8, 9, 16, 17, 32, 33, 128, 129
SPLIT_KEYS = 1024  # with this upper bound, CTAs split the keys


def draw_heads(draw: Draw) -> tuple[int, int, int]:
    """Numbers of query heads and of KV heads, and D."""
    group = draw.one(1, 1, 2, 2, 4, 8, 9, 32, 33) if draw.gpu else draw.one(1, 2, 4)
    heads = draw.number(1, 3) if group < 8 else 1
    return group * heads, heads, 16 * draw.number(1, 16)


def draw_queries(
    draw: Draw, count: int, group: int, short: int, most: int = max(ROWS)
) -> list[int]:
    """Number of queries of each sequence, up to ``short``.

    On a GPU, one sequence gets up to ``most`` rows of queries, to test ``ROWS``; a query has
    ``group`` rows, one per query head of a KV head.
    """
    queries = draw.lengths(count, 0, short)
    if draw.gpu and queries:
        rows = draw.one(*(n for n in ROWS if group <= n <= most or n == 1))
        queries[draw.number(0, count - 1)] = max(1, rows // group)
    return queries


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
    """Paged cache, with the pages and slots of its sequences."""

    cache: Tensor
    table: Tensor
    size: int
    scales: Given

    def slot(self, sequence: int, key: int) -> int:
        return int(self.table[sequence, key // self.size]) * self.size + key % self.size


def draw_pages(
    draw: Draw,
    keys: Sequence[int],
    heads: int,
    dim: int,
    dtype: torch.dtype,
    fp8: bool,
    size: int,
    most_keys: int = 0,
) -> Pages:
    """Cache with keys in shuffled pages, NaN in empty slots; contiguous, or a view of one layer.

    The table has room for ``most_keys``.
    """
    counts = [-(-n // size) for n in keys]
    order = torch.from_numpy(draw.rng.permutation(sum(counts) + 2))
    shape = len(order), draw.one(1, 1, 2), size, heads, 2 * dim
    cache = draw.floats(shape, FP32, 1).to(E4M3 if fp8 else dtype)
    columns = max([*counts, -(-most_keys // size)], default=0) + draw.one(0, 2)
    table = torch.full((len(keys), columns), NO_PAGE, dtype=INT32)
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
    return draw.one(16, 16, 16, 32, 32, 64, 24) if draw.gpu else draw.one(1, 3, 8, 16, 16, 32)


def draw_most_keys(draw: Draw) -> int:
    """Upper bound on the keys of a sequence, large enough for CTAs to split the keys; or 0."""
    return draw.one(0, SPLIT_KEYS, 2 * SPLIT_KEYS) if draw.gpu else 0


def draw_longest(draw: Draw, short: int) -> int:
    """Number of keys of the longest sequence; several key tiles on a GPU."""
    return draw.one(short, 300) if draw.gpu else short


def draw_memory(draw: Draw, counters: int, split: bool) -> Given:
    """Optional arguments of an op on a paged cache: counters, and batch invariance.

    ``counters``: least number of counters; ``split``: whether CTAs may split the keys.
    """
    given: Given = {}
    if draw.chance(0.6 if split else 0.2):
        given["counters"] = torch.zeros(counters + draw.one(0, 5), dtype=INT32)
    if draw.chance(0.15):
        given["batch_invariant"] = True
    return given


def fits_nvfp4(q: Tensor) -> bool:
    """Whether a result of ``q``'s shape can be NVFP4."""
    _, heads, dim = q.shape
    return dim % 32 == 0 and heads * dim % 64 == 0


def draw_nvfp4_rows(draw: Draw, q: Tensor) -> Given:
    """Output memory in the rows of a taller operand, in some of the draws."""
    if not draw.chance(0.3):
        return {}
    (rows, heads, dim), first = q.shape, draw.one(0, 3, 130)
    tiles = -(-(first + rows + draw.one(0, 40)) // 128)
    data = torch.full((rows, heads, dim // 2), 7, dtype=torch.uint8)
    scales = torch.full((tiles, heads * dim // 64, 32, 16), 5, dtype=torch.uint8).view(E4M3)
    return {"out": (data, scales), "first_row": first}


def refused(given: Given, kernel: bool) -> str | None:
    """Argument of a valid call that the op, or its sm_100 kernel, must refuse, or None."""
    dim = given["q"].shape[-1]
    if given.get("output") is not None and not fits_nvfp4(given["q"]):
        return "q"
    if not kernel:
        return None
    size = given["kv_cache"].shape[2]
    in_boxes = size >= 16 and size & (size - 1) == 0
    return None if in_boxes and _in_steps(given, dim) else "kv_cache"


def refused_sparse(given: Given, kernel: bool) -> str | None:
    """Variant of ``refused`` for sparse attention, whose pages may have any size."""
    return None if not kernel or _in_steps(given, given["q"].shape[-1]) else "kv_cache"


def _in_steps(given: Given, dim: int) -> bool:
    return given.get("k_scale") is None or dim % 32 == 0


def draw_paged(draw: Draw) -> Given:
    """Arguments of ``paged_attention``, in half of the draws with an NVFP4 result."""
    given = _draw_paged(draw)
    if draw.chance(0.5):
        return given
    while not fits_nvfp4(given["q"]) and draw.chance(0.9):
        given = _draw_paged(draw)
    given.pop("out", None)
    given["output"] = Static(draw.scalar(0.001))
    return given | draw_nvfp4_rows(draw, given["q"])


def _draw_paged(draw: Draw) -> Given:
    query_heads, heads, dim = draw_heads(draw)
    dtype, fp8, size = draw.one(BF16, FP16), draw.chance(0.3), draw_page_size(draw)
    count = draw.number(0, 4)
    queries = draw_queries(draw, count, query_heads // heads, draw.one(1, 9))
    keys, most = draw.lengths(count, 0, draw_longest(draw, 60)), draw_most_keys(draw)
    pages = draw_pages(draw, keys, heads, dim, dtype, fp8, size, most)
    q = draw.floats((sum(queries) + draw.one(0, 0, 2), query_heads, dim), dtype, 1)
    scoring, longest = draw_scoring(draw, query_heads), max(keys, default=0)
    if "window" not in scoring:
        scoring["causal"] = draw.chance(0.8)
    given = {
        "q": draw.heads(q), "kv_cache": pages.cache, "block_table": pages.table,
        "seq_lens": torch.tensor(keys, dtype=INT32), "query_start": starts(queries),
        "max_query_len": max(queries, default=0) + draw.one(0, 3),
        "max_seq_len": max(most, min(longest + draw.one(0, 9), pages.table.shape[1] * size)),
    } | pages.scales | scoring | draw_memory(draw, count * heads, most > 0)  # fmt: skip
    if draw.chance(0.2):
        given["out"] = torch.full(q.shape, math.nan, dtype=dtype)
    return given


def draw_sparse(draw: Draw) -> Given:
    query_heads, heads, dim = draw_heads(draw)
    dtype, fp8, size = draw.one(BF16, FP16), draw.chance(0.3), draw_page_size(draw)
    count = draw.number(0, 3)
    queries, keys = draw.lengths(count, 0, 4), draw.lengths(count, 0, 60)
    pages = draw_pages(draw, keys, heads, dim, dtype, fp8, size)
    rows, width = sum(queries), draw.one(30, 30, 400) if draw.gpu else draw.number(0, 30)
    q = draw.floats((rows, query_heads, dim), dtype, 1)
    indices = torch.full((rows, width), draw.one(-1, NO_PAGE), dtype=INT32)
    lens, row = torch.zeros(rows, dtype=INT32), 0
    for asked, there in zip(queries, keys, strict=True):
        for _ in range(asked):
            lens[row] = draw.number(0, width) if there else 0
            listed = draw.rng.integers(0, max(1, there), int(lens[row]))  # some indices repeat
            indices[row, : int(lens[row])] = torch.from_numpy(listed).to(INT32)
            row += 1
    given = {
        "q": draw.heads(q), "kv_cache": pages.cache, "indices": indices, "lens": lens,
        "block_table": pages.table, "query_start": starts(queries),
    } | pages.scales | draw_scoring(draw, query_heads, windows=False)  # fmt: skip
    if draw.chance(0.2):
        given["out"] = torch.full(q.shape, math.nan, dtype=dtype)
    return given
