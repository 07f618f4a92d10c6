"""References of the indexer's ops in torch: the kernels on CPU.

Scores are computed for a tile of queries and a block of keys at a time: only a tile's scores grow
with the length of a sequence.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nvfp4_kernels.indexer.call import GatherCall, IndexerPagedKeys, ScoreCall
from nvfp4_kernels.indexer.formats import Format, decode, quantize

# Sizes of a tile, so that operands stay in a core's cache.
ROWS = 1024  # queries times heads
BLOCK = 1024  # keys
SCORES = 1 << 22  # of a tile, at most


class SequenceKeys(Protocol):
    """Stored keys of one sequence."""

    def stored(self, first: int, count: int) -> tuple[Tensor, Tensor | None]:
        """Data and scales of ``count`` keys from ``first`` on."""


@dataclass(frozen=True)
class ContiguousKeys:
    """Contiguous keys: data and scales as ``indexer_gather_k`` returns them."""

    data: Tensor
    scales: Tensor | None

    def stored(self, first: int, count: int) -> tuple[Tensor, Tensor | None]:
        """Data and scales of ``count`` keys from ``first`` on."""
        some = slice(first, first + count)
        return self.data[some], None if self.scales is None else self.scales[some]


@dataclass(frozen=True)
class SequencePages:
    """Paged keys of one sequence.

    Attributes:
        cache: ``(pages, page_bytes)``.
        table: ``(P,)``, pages of the sequence.
        fmt: format of the keys.
        head_dim: number of elements per key.
        block_size: number of keys per page.
    """

    cache: Tensor
    table: Tensor
    fmt: Format
    head_dim: int
    block_size: int

    def stored(self, first: int, count: int) -> tuple[Tensor, Tensor | None]:
        """Data and scales of ``count`` keys from ``first`` on."""
        fmt, size, head_dim = self.fmt, self.block_size, self.head_dim
        pages = self.cache.index_select(0, self.table[first // size : -(-(first + count) // size)])
        data, scales = _parts(pages, fmt, head_dim, size)
        some = slice(first % size, first % size + count)
        data = data.flatten(0, 1)[some].view(fmt.data_dtype)
        if fmt.scale_dtype is None:
            return data, None
        scales = scales.flatten(0, 1)[some].view(fmt.scale_dtype)
        return data, scales.view(count, *fmt.scale_shape(head_dim))


@dataclass(frozen=True)
class Queries:
    """Queries, and the keys that they see.

    Attributes:
        data: ``(rows, H, D)``, packed formats ``(rows, H, D/2)``.
        scales: scales of the data, or None.
        weights: ``(rows, H)``, weights of the heads.
        starts: int32 ``(rows,)``, first key that each query sees.
        lens: int32 ``(rows,)``, number of keys that each query sees.
        keys: keys of each sequence, all with equally many rows; one entry if all rows share keys.
        fmt: format of queries and keys.
    """

    data: Tensor
    scales: Tensor | None
    weights: Tensor
    starts: Tensor
    lens: Tensor
    keys: Sequence[SequenceKeys]
    fmt: Format

    def scored(self, min_keys: int) -> Iterator[tuple[Tensor, int, Tensor]]:
        """Scores of the queries that see at least ``min_keys`` keys, tile by tile.

        Yields:
            Indices of the queries, the first key, and scores ``(queries, keys)`` from the first key
            on, −inf where a query does not see a key.
        """
        each = len(self.lens) // max(1, len(self.keys))
        for number, keys in enumerate(self.keys):
            lens = self.lens[number * each : (number + 1) * each]
            rows = (lens >= min_keys).nonzero().flatten() + number * each
            if len(rows):
                for some in rows.split(self._tile_rows(rows)):
                    yield some, *self._score(some, keys)

    def _tile_rows(self, rows: Tensor) -> int:
        """Number of queries per tile of ``rows``: the more heads or keys, the fewer queries."""
        first, last = _window(self.starts[rows], self.lens[rows])
        return max(1, min(ROWS // max(1, self.data.shape[1]), SCORES // (last - first)))

    def _score(self, rows: Tensor, keys: SequenceKeys) -> tuple[int, Tensor]:
        """First key that any query of ``rows`` sees, and the queries' scores from that key on."""
        starts, lens = self.starts[rows], self.lens[rows]
        first, last = _window(starts, lens)
        scales = None if self.scales is None else _take(self.scales, rows)
        q, factors = decode(self.fmt, _take(self.data, rows), scales)
        weights = self.weights[rows] if factors is None else self.weights[rows] * factors
        scores = q.new_empty((len(rows), last - first))
        for start in range(first, last, BLOCK):
            end = min(start + BLOCK, last)
            part = scores[:, start - first : end - first]
            part.copy_(_products(q, weights, *decode(self.fmt, *keys.stored(start, end - start))))
        return first, scores.masked_fill_(~_seen(starts - first, lens, last - first), -torch.inf)


def quantize_q(q: Tensor, fmt: Format, global_scale: Tensor | None) -> list[Tensor]:
    """See ``nvfp4_kernels.indexer.cache_op.indexer_quantize_q``."""
    data, scales = quantize(fmt, q, global_scale)
    return [data] if scales is None else [data, scales]


def store_k(
    k: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    fmt: Format,
    block_size: int,
    global_scale: Tensor | None,
) -> None:
    """See ``nvfp4_kernels.indexer.cache_op.indexer_store_k``."""
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    index = slots // block_size, slots % block_size
    quantized = quantize(fmt, k[kept], global_scale)
    for stored, given in zip(_parts(cache, fmt, k.shape[1], block_size), quantized, strict=True):
        if given is not None:
            elements = stored.shape[2] // given.element_size()
            stored[index] = given.view(len(slots), elements).view(torch.uint8)


def gather_k(call: GatherCall) -> list[Tensor]:
    """See ``nvfp4_kernels.indexer.cache_op.indexer_gather_k``."""
    out = call.fmt.empty(call.cache, (call.total_keys,), call.head_dim)
    starts = call.key_start.tolist()
    for pages, start, end in zip(call.block_table, starts[:-1], starts[1:], strict=True):
        keys = SequencePages(call.cache, pages, call.fmt, call.head_dim, call.block_size)
        for gathered, found in zip(out, keys.stored(0, end - start), strict=False):
            if found is not None:
                gathered[start:end] = found
    return out


def logits(call: ScoreCall) -> Tensor:
    """See ``nvfp4_kernels.indexer.score_op.indexer_logits``."""
    keys, queries = call.keys, _queries(call)
    columns = keys.max_context_len if isinstance(keys, IndexerPagedKeys) else len(keys.k)
    out = queries.weights.new_full((len(queries.lens), columns), -torch.inf)
    for rows, first, scores in queries.scored(call.min_keys):
        out[rows, first : first + scores.shape[1]] = scores
    return out


def topk(logits: Tensor, lens: Tensor, top_k: int, starts: Tensor | None) -> tuple[Tensor, Tensor]:
    """See ``nvfp4_kernels.indexer.topk_op.indexer_topk``."""
    indices, valid = _all_keys(lens, top_k)
    starts = torch.zeros_like(lens) if starts is None else starts
    rows = (lens > top_k).nonzero().flatten()
    for some in rows.split(max(1, SCORES // max(1, logits.shape[1]))):
        if len(some):
            indices[some] = _best(logits[some], starts[some], lens[some], top_k)
    return indices, valid


def score_topk(call: ScoreCall) -> tuple[Tensor, Tensor]:
    """See ``nvfp4_kernels.indexer.topk_op.indexer_score_topk``."""
    queries = _queries(call)
    indices, valid = _all_keys(queries.lens, call.top_k)
    for rows, first, scores in queries.scored(call.min_keys):
        starts = queries.starts[rows] - first
        indices[rows] = _best(scores, starts, queries.lens[rows], call.top_k)
    return indices, valid


def _queries(call: ScoreCall) -> Queries:
    """``Queries`` of a call, with contiguous or paged keys."""
    if isinstance(call.keys, IndexerPagedKeys):
        return _paged(call, call.keys)
    k, k_scales, ks, ke = call.keys
    keys = [ContiguousKeys(k, k_scales)]
    return Queries(call.q, call.q_scales, call.weights, ks, ke - ks, keys, call.fmt)


def _paged(call: ScoreCall, paged: IndexerPagedKeys) -> Queries:
    """``Queries`` for paged keys."""
    fmt, lens = call.fmt, paged.context_lens.flatten()
    head_dim = call.q.shape[-1] * fmt.packed
    keys = [
        SequencePages(paged.cache, pages, fmt, head_dim, paged.block_size)
        for pages in paged.block_table
    ]
    scales = None if call.q_scales is None else call.q_scales.flatten(0, 1)
    starts = torch.zeros_like(lens)
    return Queries(call.q.flatten(0, 1), scales, call.weights, starts, lens, keys, fmt)


def _all_keys(lens: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """``indices`` and ``valid``; rows that see more than ``top_k`` keys need other ``indices``."""
    keys = torch.arange(top_k, dtype=torch.int32).expand(len(lens), -1)
    return keys.where(keys < lens.unsqueeze(1), -1), lens.clamp(max=top_k)


def _best(scores: Tensor, starts: Tensor, lens: Tensor, top_k: int) -> Tensor:
    """Indices of the top-k keys, counted from ``starts``; all rows see more than ``top_k`` keys."""
    seen = _seen(starts, lens, scores.shape[1])
    scores = scores.nan_to_num(-torch.inf, torch.inf, -torch.inf).masked_fill_(~seen, -torch.inf)
    threshold = scores.topk(top_k, sorted=False).values.amin(1, keepdim=True)
    above = scores > threshold
    equal = (scores == threshold) & seen
    missing = top_k - above.sum(1, keepdim=True)
    equal &= equal.cumsum(1, dtype=torch.int32) <= missing
    # nonzero() is in the order of rows, then columns; each row has exactly top_k.
    chosen = (above | equal).nonzero()[:, 1].view(-1, top_k)
    return (chosen - starts.unsqueeze(1)).to(torch.int32)


def _products(q: Tensor, weights: Tensor, k: Tensor, factors: Tensor | None) -> Tensor:
    """Scores ``(n, m)``, ``Σ_h weights · relu(q · k)``, of q ``(n, H, D)`` and k ``(m, D)``.

    ``factors`` ``(m,)``: scales of whole keys, which multiply the scores, or None.
    """
    products = q.flatten(0, 1) @ k.T
    scores = weights.unsqueeze(1) @ products.relu_().view(*q.shape[:2], len(k))
    scores = scores.squeeze(1)
    return scores if factors is None else scores * factors


def _seen(starts: Tensor, lens: Tensor, columns: int) -> Tensor:
    """Mask ``(rows, columns)`` of the keys that each row sees."""
    column = torch.arange(columns)
    starts = starts.unsqueeze(1)
    return (column >= starts) & (column < starts + lens.unsqueeze(1))


def _window(starts: Tensor, lens: Tensor) -> tuple[int, int]:
    """First key that any row sees, and the key after the last key that any row sees."""
    return int(starts.min()), int((starts + lens).max())


def _parts(pages: Tensor, fmt: Format, head_dim: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Views of pages' data and scales as bytes, each ``(pages, block_size, bytes per key)``."""
    data, scales = fmt.data_bytes(head_dim), fmt.scale_bytes(head_dim)
    parts = pages.split([block_size * data, block_size * scales], dim=1)
    return parts[0].unflatten(1, (block_size, data)), parts[1].unflatten(1, (block_size, scales))


def _take(x: Tensor, rows: Tensor) -> Tensor:
    """Rows of ``x``; float8 does not support indexing and is viewed as bytes."""
    return x.view(torch.uint8)[rows].view(x.dtype) if x.element_size() == 1 else x[rows]
