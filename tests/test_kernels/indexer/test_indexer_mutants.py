"""Mutants of the indexer's reference: each fails the tests listed with it."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nvfp4_kernels.formats import nvfp4
from nvfp4_kernels.indexer import formats, reference
from nvfp4_kernels.indexer.call import IndexerPagedKeys, ScoreCall
from tests.mutants import Check, Mutant
from tests.mutants.kernels import check_noticed, each_test
from tests.test_kernels.indexer import test_indexer_cache as cache_tests
from tests.test_kernels.indexer import test_indexer_scores as score_tests
from tests.test_kernels.indexer import test_indexer_topk as topk_tests
from tests.test_kernels.indexer.test_indexer_topk import INF, NAN

PAGED = reference.SequencePages
best, seen, parts, products = (
    reference._best, reference._seen, reference._parts, reference._products
)  # fmt: skip
decode, quantize, store_k = reference.decode, reference.quantize, reference.store_k
paged, stored = reference._paged, PAGED.stored
encode_e2m1, decode_e2m1, exponent = formats.encode_e2m1, formats.decode_e2m1, formats._exponent


def replaced(
    name: str, value: object, tests: tuple[Check, ...], owner: object = reference
) -> Mutant:
    return Mutant.replaced(owner, name, value, tests)


def rolled(x: Tensor, dim: int) -> Tensor:
    """Roll a tensor by one, float8 included."""
    if x.element_size() > 1:
        return x.roll(1, dim)
    return x.view(torch.uint8).roll(1, dim).view(x.dtype)


def swapped(data: Tensor) -> Tensor:
    """Swap the nibbles of each byte."""
    return (data >> 4) | (data << 4)


def integers(data: Tensor) -> Tensor:
    codes = torch.stack([data & 15, data >> 4], -1).flatten(-2)
    return torch.where(codes < 8, 1.0, -1.0) * (codes & 7)


def of_keys(
    change: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]], dims: int = 2
) -> Callable[..., Any]:
    """Mutant: change data and scales of keys or, with ``dims=3``, of queries."""

    def mutant(fmt: Any, data: Tensor, scales: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return decode(fmt, *(change(data, scales) if data.ndim == dims else (data, scales)))

    return mutant


def scale_of_the_neighbour_key(keys: reference.SequencePages, first: int, count: int) -> Any:
    data, scales = stored(keys, first, count)
    return data, None if scales is None else rolled(scales, 0)


def pages_in_a_row(keys: reference.SequencePages, first: int, count: int) -> Any:
    table = (keys.table[0] + torch.arange(len(keys.table))) % len(keys.cache)
    return stored(replace(keys, table=table), first, count)


def from_the_start_of_a_page(keys: reference.SequencePages, first: int, count: int) -> Any:
    return stored(keys, first // keys.block_size * keys.block_size, count)


def scale_beside_data(
    pages: Tensor, fmt: formats.Format, head_dim: int, block_size: int
) -> tuple[Tensor, Tensor]:
    data, scales = fmt.data_bytes(head_dim), fmt.scale_bytes(head_dim)
    first, second = pages.unflatten(1, (block_size, data + scales)).split([data, scales], 2)
    return first, second


def last_of_ties(scores: Tensor, starts: Tensor, lens: Tensor, top_k: int) -> Tensor:
    chosen = best(scores.flip(1), scores.shape[1] - starts - lens, lens, top_k)
    return lens.unsqueeze(1) - 1 - chosen.flip(1)


def by_bits(scores: Tensor, *rest: Any) -> Tensor:
    """Mutant: order negative zero below zero."""
    negative = (scores == 0) & torch.signbit(scores)
    return best(scores.masked_fill(negative, -1e-45), *rest)


def by_score(scores: Tensor, starts: Tensor, lens: Tensor, top_k: int) -> Tensor:
    chosen = best(scores, starts, lens, top_k)
    values = scores.gather(1, (chosen + starts.unsqueeze(1)).long())
    return chosen.gather(1, values.argsort(dim=1, descending=True, stable=True))


def from_the_first_column(scores: Tensor, starts: Tensor, *rest: Any) -> Tensor:
    return best(scores, starts, *rest) + starts.unsqueeze(1)


def row_by_row_of_the_tile(scores: Tensor, starts: Tensor, lens: Tensor, top_k: int) -> Tensor:
    """Mutant: give all rows of a tile the first row's range."""
    return best(scores, starts[:1].expand_as(starts), lens, top_k)


def no_relu(q: Tensor, weights: Tensor, k: Tensor, factors: Tensor | None) -> Tensor:
    found = (weights.unsqueeze(1) @ (q @ k.T)).squeeze(1)
    return found if factors is None else found * factors


def relu_of_the_sum(*arguments: Any) -> Tensor:
    return no_relu(*arguments).relu()


def length_of_the_first(call: ScoreCall, keys: IndexerPagedKeys) -> reference.Queries:
    lens = keys.context_lens
    first = lens[:, :1].expand_as(lens).contiguous()
    return paged(call, keys._replace(context_lens=first))


def last_slot_for_none(k: Tensor, cache: Tensor, slot_mapping: Tensor, *rest: Any) -> None:
    last = len(cache) * rest[1] - 1
    store_k(k, cache, slot_mapping.where(slot_mapping >= 0, last), *rest)


def in_order(k: Tensor, cache: Tensor, slot_mapping: Tensor, *rest: Any) -> None:
    """Mutant: store keys contiguously from the first slot on."""
    store_k(k, cache, slot_mapping.min() + torch.arange(len(k)), *rest)


def unscaled(fmt: Any, x: Tensor, global_scale: Tensor | None) -> Any:
    return quantize(fmt, x, None if global_scale is None else torch.ones(()))


def floor_of_ocp(amax: Tensor, largest: float) -> Tensor:
    return torch.frexp(amax).exponent - 1 - 2


def scored(name: str, *fmts: str) -> tuple[Check, ...]:
    """Tests of scores and top-k of a case, in the given formats."""
    tests = (score_tests.test_logits_paged, score_tests.test_score_topk_paged)
    return tuple(partial(test, name, fmt) for fmt in fmts for test in tests)


def quantized(*fmts: str) -> tuple[Check, ...]:
    return tuple(partial(cache_tests.test_quantize, fmt, (5, 8, 128)) for fmt in fmts)


def on_small(row: list[float], top_k: int, expected: list[int]) -> Check:
    return partial(topk_tests.test_small, row, top_k, expected)


ALL = ("nvfp4", "mxfp4", "fp8", "bf16")
QUERIES = "several queries"
TIES = (
    on_small([5.0, 5.0, 5.0, 5.0], 2, [0, 1]),
    partial(topk_tests.test_long_rows, 2048),
    partial(score_tests.test_score_topk_paged, "longer than a block", "nvfp4"),
    partial(score_tests.test_score_topk, "longer than a block", "fp8"),
)
ZEROS = on_small([0.0, -0.0, 0.0], 2, [0, 1]), on_small([-0.0, 0.0, -1.0], 1, [0])
WINDOWS = (
    partial(topk_tests.test_what_a_row_does_not_see, NAN),
    partial(topk_tests.test_what_a_row_does_not_see, INF),
)
PREFILL = tuple(partial(score_tests.test_prefill, fmt) for fmt in ALL)
MUTANTS = {
    "E2M1 read as integers": replaced(
        "decode_e2m1", integers, scored(QUERIES, "nvfp4", "mxfp4"), owner=formats
    ),
    "E2M1 of keys high nibble first": replaced(
        "decode", of_keys(lambda d, s: (swapped(d), s)), scored(QUERIES, "nvfp4", "mxfp4")
    ),
    "NVFP4 written high nibble first": replaced(
        "encode_e2m1", lambda x: swapped(encode_e2m1(x)), quantized("nvfp4"), owner=nvfp4
    ),
    "MXFP4 written high nibble first": replaced(
        "encode_e2m1", lambda x: swapped(encode_e2m1(x)), quantized("mxfp4"), owner=formats
    ),
    "keys with the scale of the neighbouring block": replaced(
        "decode",
        of_keys(lambda d, s: (d, None if s is None else rolled(s, -1))),
        scored(QUERIES, "nvfp4", "mxfp4"),
    ),
    "queries with the scale of the neighbouring block": replaced(
        "decode",
        of_keys(lambda d, s: (d, None if s is None else rolled(s, -1)), dims=3),
        scored(QUERIES, "nvfp4", "mxfp4", "fp8"),
    ),
    "scale of the neighbouring key": replaced(
        "stored",
        scale_of_the_neighbour_key,
        (
            *scored(QUERIES, "nvfp4", "mxfp4", "fp8"),
            *(partial(cache_tests.test_gather, fmt) for fmt in ("nvfp4", "mxfp4", "fp8")),
        ),
        owner=PAGED,
    ),
    "FP8 keys without scales": replaced(
        "_products", lambda q, w, k, _: products(q, w, k, None), scored(QUERIES, "fp8")
    ),
    "FP8 queries without scales": replaced(
        "decode", of_keys(lambda d, s: (d, torch.ones(d.shape[:2])), dims=3), scored(QUERIES, "fp8")
    ),
    "pages in a row": replaced(
        "stored",
        pages_in_a_row,
        (
            *scored("keys at the ends of pages", *ALL),
            *(partial(cache_tests.test_gather, fmt) for fmt in ALL),
        ),
        owner=PAGED,
    ),
    "blocks from the start of a page": replaced(
        "stored",
        from_the_start_of_a_page,
        scored("blocks that begin within a page", "nvfp4"),
        owner=PAGED,
    ),
    "scale beside its data": replaced(
        "_parts",
        scale_beside_data,
        tuple(
            partial(test, fmt, *rest)
            for fmt in ("nvfp4", "mxfp4", "fp8")
            for test, *rest in (
                (cache_tests.test_gather,),
                (cache_tests.test_store, 128, 64, 0),
                (score_tests.test_garbage_in_unused_slots, 0xFF),
            )
        ),
    ),
    "slot -1 is the last": replaced(
        "store_k",
        last_slot_for_none,
        tuple(partial(cache_tests.test_skipped_keys, fmt) for fmt in ALL),
    ),
    "keys stored in a row": replaced(
        "store_k", in_order, tuple(partial(cache_tests.test_store, fmt, 128, 64, 0) for fmt in ALL)
    ),
    "global scale left out": replaced("quantize", unscaled, quantized("nvfp4")),
    "exponent one too high": replaced(
        "_exponent", lambda *a: exponent(*a) + 1, quantized("mxfp4", "fp8"), owner=formats
    ),
    "exponent of OCP": replaced("_exponent", floor_of_ocp, quantized("mxfp4"), owner=formats),
    "exponent wrong at powers of two": replaced(
        "_exponent",
        lambda amax, largest: (amax / largest).log2().floor().int() + 1,
        tuple(partial(cache_tests.test_every_maximum, fmt) for fmt in ("mxfp4", "fp8")),
        owner=formats,
    ),
    "zeros without a least scale": replaced(
        "FP8_LEAST", 1e-30, (partial(cache_tests.test_zeros, "fp8", 2.0**-22),), owner=formats
    ),
    "relu left out": replaced("_products", no_relu, scored(QUERIES, *ALL)),
    "relu of the sum": replaced("_products", relu_of_the_sum, scored(QUERIES, *ALL)),
    "weight of the neighbouring head": replaced(
        "_products", lambda q, w, *rest: products(q, w.roll(1, 1), *rest), scored(QUERIES, *ALL)
    ),
    "first key not seen": replaced(
        "_seen",
        lambda starts, lens, columns: seen(starts + 1, lens - 1, columns),
        (*scored(QUERIES, *ALL), *PREFILL),
    ),
    "last key not seen": replaced(
        "_seen",
        lambda starts, lens, columns: seen(starts, lens - 1, columns),
        (*scored(QUERIES, *ALL), *PREFILL),
    ),
    "key before the first seen": replaced(
        "_seen",
        lambda starts, lens, columns: seen(starts - 1, lens + 1, columns),
        (*PREFILL, WINDOWS[1]),
    ),
    "key after the last seen": replaced(
        "_seen",
        lambda starts, lens, columns: seen(starts, lens + 1, columns),
        (partial(score_tests.test_logits_paged, QUERIES, "bf16"), *PREFILL, WINDOWS[1]),
    ),
    "every query as long as the first": replaced(
        "_paged", length_of_the_first, scored(QUERIES, *ALL)
    ),
    "tie to the last": replaced("_best", last_of_ties, TIES),
    "negative zero below zero": replaced("_best", by_bits, ZEROS),
    "NaN the highest": replaced(
        "_best",
        lambda scores, *rest: best(scores.nan_to_num(INF, INF, -INF), *rest),
        (
            on_small([NAN, 1.0, NAN, 0.0], 2, [1, 3]),
            topk_tests.test_nan_at_the_threshold,
            partial(score_tests.test_nan_in_a_key, "nvfp4"),
        ),
    ),
    "infinity as NaN": replaced(
        "_best",
        lambda scores, *rest: best(scores.masked_fill(scores == INF, NAN), *rest),
        (on_small([3e38, INF, -INF, INF], 2, [1, 3]),),
    ),
    "in the order of scores": replaced("_best", by_score, scored(QUERIES, *ALL)[1::2]),
    "indices from the first column": replaced(
        "_best", from_the_first_column, (*PREFILL, WINDOWS[0])
    ),
    "all rows with the range of the first": replaced(
        "_best", row_by_row_of_the_tile, (*PREFILL, WINDOWS[1])
    ),
    "one key too few": replaced(
        "_all_keys",
        lambda lens, top_k: reference_all_keys((lens - 1).clamp(min=0), top_k),
        scored("top of exactly all", "nvfp4")[1:],
    ),
}
reference_all_keys = reference._all_keys


@each_test(MUTANTS)
def test_mutant_is_found(mutant: Mutant, test: Check) -> None:
    check_noticed(mutant, test)
