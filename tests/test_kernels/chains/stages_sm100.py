"""Stages of sm_100: every op, on eight tokens of 256 elements.

| kind | value |
|---|---|
| rows | bfloat16 (8, 256), activations; also seen as four heads of 64, or as 32 keys |
| read rows | the same rows, read by the preceding stage, to be overwritten |
| operand | data and blocked scales of NVFP4 rows |
| scaled operand | an operand and a row scale |
| long operand | an operand with half the number of rows, of twice the length |
| segment | result and LSE of attention |
| queries, keys | data and scales of the indexer's vectors |
| pages | a paged cache of keys and values; read pages: the same, to be overwritten |
| cache | the indexer's pages; read cache: the same, to be overwritten |
| logits | float32 (8, 32) |
| lists | indices, int32 (8, 4), and the number of valid indices per row, int32 (8,) |

Stages of a mixture of experts are in ``stages_experts``.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

import nvfp4_kernels as ops
from nvfp4_kernels import PerToken, Static
from nvfp4_kernels.formats.nvfp4 import Nvfp4Tensor, quantize_weight
from nvfp4_kernels.gemm.sm100.tile import Tile
from nvfp4_kernels.indexer.formats import format_of
from nvfp4_kernels.indexer.sm100.tile import ScoreTile
from nvfp4_kernels.indexer.topk.tile import TopkTile, bitmap_words
from nvfp4_kernels.quantize.call import QuantizeCall
from tests.test_kernels.attention.attention_cases import Case as AttentionCase
from tests.test_kernels.attention.attention_cases import starts
from tests.test_kernels.chains import stages_experts
from tests.test_kernels.chains.stage import Stage, Value
from tests.test_kernels.indexer import best_keys_cases, topk_cases

TOKENS, HIDDEN, HEADS, HEAD_DIM = 8, 256, 4, 64
KEYS, TOP_K, PAGE = TOKENS * HEADS, 4, 16
FORMAT = "nvfp4"
EPS = 1e-5


def scalar() -> Tensor:
    """Global scale, float32 ()."""
    return torch.tensor(0.01)


@cache
def weight(n: int, k: int) -> Nvfp4Tensor:
    """Weight of a product, in the blocked layout."""
    return quantize_weight(torch.randn(n, k)).to_blocked()


def new_rows() -> Tensor:
    return torch.randn(TOKENS, HIDDEN).bfloat16()


def operand(rows: Tensor) -> tuple[Tensor, Tensor]:
    """NVFP4 operand of rows, quantised by the reference."""
    from nvfp4_kernels.quantize import reference

    return reference.quantize(QuantizeCall(rows, Static(scalar())))


def cache_pages() -> Tensor:
    """The indexer's cache pages, all zero."""
    return torch.zeros(KEYS // PAGE, format_of(FORMAT).page_bytes(HEAD_DIM, PAGE)).byte()


def new_vectors(count: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Data and scales of the indexer's vectors."""
    shape = (*count, HEAD_DIM // 2)
    scales = torch.ones(*count, HEAD_DIM // 16).to(torch.float8_e4m3fn)
    return torch.randint(0, 256, shape, dtype=torch.uint8), scales


def new_lists() -> tuple[Tensor, Tensor]:
    indices = torch.arange(TOP_K, dtype=torch.int32).repeat(TOKENS, 1)
    return indices, torch.full((TOKENS,), TOP_K, dtype=torch.int32)


def new_segment() -> tuple[Tensor, Tensor]:
    return torch.randn(TOKENS, HEADS, HEAD_DIM).bfloat16(), torch.randn(TOKENS, HEADS)


GIVEN: dict[str, Callable[[], Value]] = {
    "rows": new_rows,
    "read rows": new_rows,
    "operand": lambda: operand(new_rows()),
    "scaled operand": lambda: (*operand(new_rows()), torch.rand(TOKENS)),
    "long operand": lambda: operand(new_rows().view(-1, 2 * HIDDEN)),
    "segment": new_segment,
    "queries": lambda: new_vectors((TOKENS, HEADS)),
    "keys": lambda: new_vectors((KEYS,)),
    "pages": lambda: new_pages(),
    "read pages": lambda: new_pages(),
    "cache": cache_pages,
    "read cache": cache_pages,
    "logits": lambda: torch.randn(TOKENS, KEYS),
    "lists": new_lists,
    **stages_experts.GIVEN,
    **stages_experts.NVFP4_GIVEN,
}

# --- activations and products -------------------------------------------------------------------


def product(
    op: str,
    tile: Tile | None,
    a: Value,
    bias: Tensor | None = None,
    output: Callable[[], ops.Static] | None = None,
) -> tuple[Value, ...]:
    """Result of ``gemm`` or a sibling, on ``tile`` or on the tile of ``choose_config``."""
    data, scales, *row_scale = a
    k = 2 * data.shape[1]
    n = TOKENS * HIDDEN // len(data)  # as many elements as ``rows`` has
    w = weight(n, k)
    given = {"a": data, "a_scales": scales, "row_scale": row_scale[0] if row_scale else None}
    if op.startswith("silu"):
        given |= {"b1": w.data, "b1_scales": w.scales, "b2": w.data, "b2_scales": w.scales}
        given |= {"alpha": torch.ones(2)}
    else:
        given |= {
            "b": w.data,
            "b_scales": w.scales,
            "alpha": torch.ones(1),
            "shard_sizes": [n],
            "bias": bias,
        }
    if output is not None:
        given["output"] = output()
    with pytest.MonkeyPatch.context() as patch:
        if tile is not None:
            use(tile, patch)
        out = getattr(ops, op)(**given)
    return (out if output is not None else out.view(TOKENS, HIDDEN),)


def use(tile: Tile, patch: pytest.MonkeyPatch) -> None:
    """Make products use ``tile``."""
    from nvfp4_kernels.gemm.sm100 import launch
    from nvfp4_kernels.gemm.sm100.choose import with_store

    patch.setattr(
        launch,
        "choose_config",
        lambda problem, output, sms: (tile, with_store(replace(output), tile, problem.n)),
    )


PRODUCTS = [
    *(
        Stage(
            f"{op}{form}, {takes}", "gemm", takes, gives,
            partial(product, op, None, output=output),
        )
        for op in ("gemm", "silu_mul_gemm")
        for form, output, gives in (
            ("", None, ("rows",)),
            (" to NVFP4", lambda: ops.Static(scalar()), ("operand",)),
        )
        for takes in ("operand", "scaled operand")
    ),
    Stage(
        "gemm, bias", "gemm", "rows", ("rows",),
        lambda rows: product("gemm", None, operand(new_rows()), rows[0]),
    ),
    Stage(
        "gemm, 2 CTAs", "gemm", "scaled operand", ("rows",),
        partial(product, "gemm", Tile(64, two_cta=True, cluster_m=2)),
    ),
    Stage(
        "gemm, K in 2", "gemm", "long operand", ("rows",),
        partial(product, "gemm", Tile(64, split_k=2)),
    ),
]  # fmt: skip


def output_of(per_token: bool) -> Static | PerToken:
    return PerToken() if per_token else Static(scalar())


def quantized(op: str, per_token: bool, rows: Tensor) -> tuple[Value, ...]:
    """Result of ``quantize`` or ``silu_mul_quantize``, and its input rows."""
    return (getattr(ops, op)(rows, output_of(per_token)), rows)


def quantized_long(rows: Tensor) -> tuple[Value, ...]:
    """Result of ``quantize`` for rows twice as long."""
    return (ops.quantize(rows.view(-1, 2 * HIDDEN), Static(scalar())),)


def normed(per_token: bool, rows: Tensor) -> tuple[Value, ...]:
    """Result of ``rms_norm_quantize``."""
    factors = torch.ones(HIDDEN).bfloat16()
    return (ops.rms_norm_quantize(rows, factors, EPS, output_of(per_token)),)


def added(per_token: bool, is_residual: bool, rows: Tensor) -> tuple[Value, ...]:
    """Result of ``add_rms_norm_quantize``, and the new residual."""
    factors, other = torch.ones(HIDDEN).bfloat16(), new_rows()
    x, residual = (other, rows) if is_residual else (rows, other)
    output = output_of(per_token)
    *result, out = ops.add_rms_norm_quantize(x, residual, factors, EPS, output)
    return tuple(result), out


def _forms(per_token: bool) -> tuple[str, str]:
    return (" per token", "scaled operand") if per_token else ("", "operand")


QUANTIZERS = [
    Stage("quantize, long", "quantize", "rows", ("long operand",), quantized_long),
    *(
    stage
    for per_token in (False, True)
    for form, result in (_forms(per_token),)
    for stage in (
        *(
            Stage(
                f"{op}{form}", op, "rows", (result, "read rows"),
                partial(quantized, op, per_token),
            )
            for op in ("quantize", "silu_mul_quantize")
        ),
        Stage(
            f"rms_norm_quantize{form}", "rms_norm_quantize", "rows", (result,),
            partial(normed, per_token),
        ),
        *(
            Stage(
                f"add_rms_norm_quantize{form}, {name}", "rms_norm_quantize", "rows",
                (result, "rows"), partial(added, per_token, name == "residual"),
                twin=f"add_rms_norm_quantize{form}, x" if name == "residual" else "",
            )
            for name in ("x", "residual")
        ),
    )
    ),
]  # fmt: skip

# --- attention ----------------------------------------------------------------------------------

KV = AttentionCase((TOKENS,), (KEYS,), HEADS, 1, HEAD_DIM, PAGE)


def new_pages() -> Tensor:
    """A paged cache of keys and values."""
    pages: Tensor = KV.problem().paged()["kv_cache"]
    return pages


def rotated_and_stored(pages: Tensor | None, rows: Tensor) -> tuple[Value, ...]:
    """Rotated queries, and the cache with new keys and values."""
    pages = new_pages() if pages is None else pages
    numbers, heads = torch.arange(TOKENS), heads_of(rows)
    angles = torch.ones(TOKENS, HEAD_DIM).bfloat16()
    keys = heads[:, :1]
    out = ops.rotary_store(heads, keys, keys, numbers, angles, pages, numbers)
    return flat(out), pages


def heads_of(rows: Tensor) -> Tensor:
    return rows.view(TOKENS, HEADS, HEAD_DIM)


def flat(out: Tensor) -> Tensor:
    return out.view(TOKENS, HIDDEN)


def attended(rows: Tensor) -> tuple[Value, ...]:
    """Attention of rows to themselves."""
    x = heads_of(rows).unsqueeze(0)
    out, lse = ops.attention(x, x, x)
    return flat(out), (out[0], lse[0])


def attended_pages(splits: int, into: bool, rows: Tensor) -> tuple[Value, ...]:
    """Paged attention of ``rows``, or with ``into`` as its output."""
    from nvfp4_kernels.attention.sm100 import launch
    from nvfp4_kernels.attention.sm100.tile import AttentionTile

    given = KV.problem().paged()
    given |= {"out" if into else "q": heads_of(rows)}
    with pytest.MonkeyPatch.context() as patch:
        tile = AttentionTile(HEAD_DIM, max_stages=3)
        patch.setattr(launch, "choose_config", lambda problem, sms: (tile, splits))
        out, lse = ops.paged_attention(**given)
    return flat(out), (out, lse)


def attended_stored(pages: Tensor) -> tuple[Value, ...]:
    """Paged attention to keys of given pages; returns the pages as well."""
    out, _ = ops.paged_attention(**KV.problem().paged() | {"kv_cache": pages})
    return flat(out), pages


def sparse(given: dict[str, Any]) -> tuple[Value, ...]:
    """Sparse attention of one sequence; ``given`` are the arguments besides keys and values."""
    paged = KV.problem().paged()
    indices, lens = new_lists()
    rest = {"q": paged["q"], "indices": indices, "lens": lens, "query_start": starts((TOKENS,))}
    names = ("kv_cache", "block_table")
    out, lse = ops.sparse_attention(**{n: paged[n] for n in names} | rest | given)
    return flat(out), (out, lse)


def merged(segment: Value) -> tuple[Value, ...]:
    """Merge of a single segment."""
    out, lse = segment
    return (flat(ops.merge_segments(out.unsqueeze(0), lse.unsqueeze(0))[0]),)


_SEGMENT = ("rows", "segment")
ATTENTION = [
    Stage("attention", "attention", "rows", _SEGMENT, attended),
    Stage("paged_attention", "attention", "rows", _SEGMENT, partial(attended_pages, 1, False)),
    Stage(
        "paged_attention, split", "attention", "rows", _SEGMENT, partial(attended_pages, 2, False)
    ),
    Stage(
        "paged_attention into", "attention", "read rows", _SEGMENT, partial(attended_pages, 1, True)
    ),
    Stage(
        "paged_attention, stored", "attention", "pages", ("rows", "read pages"), attended_stored
    ),
    Stage(
        "sparse_attention", "attention", "rows", _SEGMENT,
        lambda rows: sparse({"q": heads_of(rows)}),
    ),
    Stage(
        "sparse_attention, lists", "attention", "lists", _SEGMENT,
        lambda lists: sparse({"indices": lists[0], "lens": lists[1]}), twin="sparse_attention",
    ),
    Stage("merge_segments", "merge_segments", "segment", ("rows",), merged),
]  # fmt: skip

ROTATION = [
    Stage(
        "rotary_store", "rotary_store", "rows", ("rows", "pages"),
        partial(rotated_and_stored, None),
    ),
    Stage(
        "rotary_store into", "rotary_store", "read pages", ("rows", "pages"),
        lambda pages: rotated_and_stored(pages, new_rows()), twin="rotary_store",
    ),
]  # fmt: skip

# --- indexer ------------------------------------------------------------------------------------


def stored(pages: Tensor, keys: Tensor) -> tuple[Value, ...]:
    """The cache with rows stored as keys."""
    ops.indexer_store_k(
        keys.view(KEYS, HEAD_DIM), pages, torch.arange(KEYS), FORMAT, PAGE, scalar()
    )
    return (pages,)


def table() -> Tensor:
    return torch.arange(KEYS // PAGE, dtype=torch.int32).unsqueeze(0)


def scored(top_k: int, given: dict[str, Any]) -> tuple[Value, ...]:
    """Scores of contiguous keys, or their top-k if ``top_k`` is not 0."""
    q, k = given.get("q") or new_vectors((TOKENS, HEADS)), given.get("k") or new_vectors((KEYS,))
    ends = given.get("ends", torch.full((TOKENS,), KEYS, dtype=torch.int32))
    keys = ops.IndexerKeys(*k, torch.zeros_like(ends), ends)
    arguments = (*q, keys, torch.ones(TOKENS, HEADS))
    if top_k:
        return (ops.indexer_score_topk(*arguments, top_k, FORMAT),)
    return (ops.indexer_logits(*arguments, FORMAT),)


def scored_pages(top_k: int, given: dict[str, Any]) -> tuple[Value, ...]:
    """Scores of paged keys, or their top-k, and the cache."""
    q = given.get("q") or new_vectors((TOKENS, HEADS))
    pages = given.get("cache", cache_pages())
    ends = given.get("ends", torch.full((TOKENS,), KEYS, dtype=torch.int32))
    batched = [x.unsqueeze(0) for x in q]
    keys = ops.IndexerPagedKeys(pages, ends.view(1, TOKENS), table(), KEYS, PAGE)
    arguments = (*batched, keys, torch.ones(TOKENS, HEADS))
    if top_k:
        return ops.indexer_score_topk(*arguments, top_k, FORMAT), pages
    return ops.indexer_logits(*arguments, FORMAT), pages


CAPACITY = 1280
FEW_THREADS = TopkTile(128, 1, CAPACITY, bitmap_words(KEYS, 1, 128))


def best(logits: Tensor | None, lens: Tensor | None) -> tuple[Value, ...]:
    """Top-k of given logits, or of rows of given lengths."""
    logits = GIVEN["logits"]() if logits is None else logits
    lens = torch.full((TOKENS,), KEYS, dtype=torch.int32) if lens is None else lens
    with pytest.MonkeyPatch.context() as patch:
        topk_cases.use(patch, FEW_THREADS)
        return (ops.indexer_topk(logits, lens, TOP_K),)


def best_of_splits(q: Value) -> tuple[Value, ...]:
    """Top-k by two kernels: the second merges the candidates of the first one's splits."""
    tile = ScoreTile(FORMAT, HEAD_DIM, HEADS, 1, 1)
    with pytest.MonkeyPatch.context() as patch:
        best_keys_cases.use(patch, best_keys_cases.chosen(tile, CAPACITY, splits=2))
        topk_cases.use(patch, FEW_THREADS)
        return scored(TOP_K, {"q": q})


VECTORS = [
    Stage(
        "indexer_quantize_q", "indexer.vectors", "rows", ("queries",),
        lambda rows: (ops.indexer_quantize_q(heads_of(rows), FORMAT, scalar()),),
    ),
    Stage(
        "indexer_store_k", "indexer.vectors", "rows", ("cache",),
        lambda rows: stored(cache_pages(), rows),
    ),
    Stage(
        "indexer_store_k into", "indexer.vectors", "read cache", ("cache",),
        lambda pages: stored(pages, new_rows()), twin="indexer_store_k",
    ),
    Stage(
        "indexer_gather_k", "indexer.vectors", "cache", ("keys", "read cache"),
        lambda pages: (
            ops.indexer_gather_k(pages, table(), starts((KEYS,)), KEYS, HEAD_DIM, FORMAT, PAGE),
            pages,
        ),
    ),
    Stage(
        "indexer_topk", "indexer.topk", "logits", ("lists", "choices"),
        lambda x: (found := best(x, None)[0], found[0]),
    ),
    Stage("indexer_topk, lens", "indexer.topk", "lists", ("lists",), lambda x: best(None, x[1])),
]  # fmt: skip


def _scores(top_k: int) -> list[Stage]:
    op, gives = ("indexer_score_topk", "lists") if top_k else ("indexer_logits", "logits")
    return [
        Stage(op, "indexer.sm100", "queries", (gives,), lambda q: scored(top_k, {"q": q})),
        Stage(
            f"{op}, keys", "indexer.sm100", "keys", (gives,),
            lambda k: scored(top_k, {"k": k}), twin=op,
        ),
        Stage(
            f"{op}, ends", "indexer.sm100", "lists", (gives,),
            lambda lists: scored(top_k, {"ends": lists[1]}), twin=op,
        ),
        Stage(
            f"{op}_paged", "indexer.sm100", "queries", (gives, "read cache"),
            lambda q: scored_pages(top_k, {"q": q}),
        ),
        Stage(
            f"{op}_paged, cache", "indexer.sm100", "cache", (gives, "read cache"),
            lambda pages: scored_pages(top_k, {"cache": pages}), twin=f"{op}_paged",
        ),
        Stage(
            f"{op}_paged, ends", "indexer.sm100", "lists", (gives, "read cache"),
            lambda lists: scored_pages(top_k, {"ends": lists[1]}), twin=f"{op}_paged",
        ),
    ]  # fmt: skip


SCORES = [
    *(stage for top_k in (0, TOP_K) for stage in _scores(top_k)),
    Stage("indexer_score_topk, splits", "indexer.sm100", "queries", ("lists",), best_of_splits),
]
STAGES = [
    *PRODUCTS,
    *QUANTIZERS,
    *ATTENTION,
    *ROTATION,
    *VECTORS,
    *SCORES,
    *stages_experts.SM100,
]
