"""``attention`` and ``paged_attention`` in torch: the references, which are also the CPU kernels.

Queries are taken in tiles of one sequence each. Tiles of equal size, such as the tiles of all
decoding sequences, are computed together, a block of keys at a time, with a running row max and row
sum: memory does not grow with the length of a sequence. With ``Scoring.batch_invariant``
each query is a tile computed by itself, and the tensor sizes depend on the query's position alone:
torch picks the summation order of a GEMM and the code of an exponential by tensor size.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from nvfp4_kernels.attention.call import AttentionCall, PagedCall
from nvfp4_kernels.attention.scoring import Scoring
from nvfp4_kernels.formats.nvfp4_rows import Nvfp4Rows

# Block sizes: chosen to keep a block in a core's cache.
ROWS = 1024  # queries times heads
BLOCK = 512  # keys
ELEMENTS = 1 << 20  # keys and values, in elements

LOG2_E = math.log2(math.e)
# For a row without keys: finite, so that its distance to −inf is no NaN.
LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class Tile:
    """Queries of one sequence, and their visible keys.

    Attributes:
        sequence: index of the sequence.
        row: index of the first query among all queries.
        rows: number of queries.
        position: position of the first query in the sequence; negative if the sequence has fewer
            keys than queries.
        first: first key; if paged, the first key of a page.
        last: one past the last key.
    """

    sequence: int
    row: int
    rows: int
    position: int
    first: int
    last: int

    @property
    def keys(self) -> int:
        """Number of keys."""
        return self.last - self.first


class KeyValues(Protocol):
    """Interface to ragged, paged or listed keys and values.

    Attributes:
        heads: number of KV heads.
        page_size: factor of every tile's first key: keys per page if paged, else 1.
    """

    @property
    def heads(self) -> int: ...
    @property
    def page_size(self) -> int: ...
    def block(self, tiles: Sequence[Tile], start: int, count: int) -> tuple[Tensor, Tensor]:
        """K and V of ``count`` keys per tile, from the tile's key ``first + start`` on.

        Both are float32 ``(tiles, heads, count, D)``; elements past a tile's last key are
        undefined.
        """


@dataclass(frozen=True)
class RaggedKeyValues:
    """K and V ``(total, heads, D)``, with the first row of each sequence."""

    k: Tensor
    v: Tensor
    starts: Sequence[int]

    @property
    def heads(self) -> int:
        return self.k.shape[1]

    @property
    def page_size(self) -> int:
        return 1

    def block(self, tiles: Sequence[Tile], start: int, count: int) -> tuple[Tensor, Tensor]:
        starts = [self.starts[t.sequence] for t in tiles]
        bounds = [(s + t.first + start, s + t.last - 1) for s, t in zip(starts, tiles, strict=True)]
        first, last = torch.tensor(bounds).view(-1, 2, 1).unbind(1)
        rows = (first + torch.arange(count)).minimum(last).flatten()
        shape = (len(tiles), count, *self.k.shape[1:])
        both = (x.index_select(0, rows).view(shape) for x in (self.k, self.v))
        k, v = (to_float32(x.transpose(1, 2)) for x in both)
        return k, v


@dataclass(frozen=True)
class PagedKeyValues:
    """Paged cache ``(pages, heads, page_size, 2·D)``, with a table of each sequence's pages."""

    cache: Tensor
    table: Tensor

    @property
    def heads(self) -> int:
        return self.cache.shape[1]

    @property
    def page_size(self) -> int:
        return self.cache.shape[2]

    def block(self, tiles: Sequence[Tile], start: int, count: int) -> tuple[Tensor, Tensor]:
        size, head_dim = self.page_size, self.cache.shape[3] // 2
        pages = self._pages(tiles, start, -(-count // size))
        shape = (len(tiles), self.heads, pages.shape[2] * size, head_dim)
        k, v = (to_float32(half).view(shape)[:, :, :count] for half in pages.split(head_dim, -1))
        return k, v

    def _pages(self, tiles: Sequence[Tile], start: int, count: int) -> Tensor:
        """Pages ``(tiles, heads, count, page_size, 2·D)``, copied in the cache's memory order.

        A tile's last page is repeated past the tile's end.
        """
        size = self.page_size
        bounds = [((t.first + start) // size, (t.last - 1) // size, t.sequence) for t in tiles]
        first, last, sequence = torch.tensor(bounds).view(-1, 3, 1).unbind(1)
        indices = self.table[sequence, (first + torch.arange(count)).minimum(last)]
        by_token = self.cache.stride(1) < self.cache.stride(2)
        stored = self.cache.transpose(1, 2) if by_token else self.cache
        if stored.dtype == torch.float8_e4m3fn:
            stored = stored.view(torch.uint8)  # float8 has no index_select
        found = stored.index_select(0, indices.flatten()).view(self.cache.dtype)
        pages = found.view(*indices.shape, *stored.shape[1:])
        return pages.movedim(-2, 1) if by_token else pages.transpose(1, 2)


def attention(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """See ``nvfp4_kernels.attention.op.attention``."""
    q, k, v, sinks, query_start, key_start, *_ = call
    if query_start is None or key_start is None:
        batch, queries, keys = q.shape[0], q.shape[1], k.shape[1]
        starts = [b * queries for b in range(batch + 1)]
        key_values = RaggedKeyValues(
            k.flatten(0, 1), v.flatten(0, 1), [b * keys for b in range(batch)]
        )
        lengths = [keys] * batch
        out, lse = attend(q.flatten(0, 1), key_values, starts, lengths, sinks, call.scoring)
        return out.view(q.shape), lse.view(q.shape[:-1])
    starts = key_start.tolist()
    lengths = [end - start for start, end in itertools.pairwise(starts)]
    key_values = RaggedKeyValues(k, v, starts)
    return attend(q, key_values, query_start.tolist(), lengths, sinks, call.scoring)


def paged_attention(call: PagedCall) -> tuple[Tensor, Tensor]:
    """See ``nvfp4_kernels.attention.paged_op.paged_attention``."""
    out, scoring = call.out, call.scoring
    if isinstance(out, Nvfp4Rows):
        values, lse = paged_attention(call._replace(out=None))
        out.write(values)
        return out.data, lse
    if call.k_scale is not None:
        scoring = replace(scoring, scale=scoring.scale * call.k_scale.item())
    key_values = PagedKeyValues(call.kv_cache, call.block_table)
    starts, lengths = call.query_start.tolist(), call.seq_lens.tolist()
    return attend(
        call.q, key_values, starts, lengths, call.sinks, scoring, v_scale=call.v_scale, out=out
    )


def attend(
    q: Tensor,
    key_values: KeyValues,
    starts: Sequence[int],
    lengths: Sequence[int],
    sinks: Tensor | None,
    scoring: Scoring,
    *,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend queries ``(T, Hq, D)``.

    Sequence b has the rows from ``starts[b]`` up to but excluding ``starts[b + 1]``, and
    ``lengths[b]`` keys. Results are multiplied by ``v_scale`` and written to ``out``; None: to a
    new tensor of ``q``'s dtype and shape. Returns that tensor and the LSE, float32 ``(T, Hq)``.
    """
    out = q.new_empty(q.shape) if out is None else out
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    size = max(1, ROWS // q.shape[1])
    max_tiles = max(1, ELEMENTS // (key_values.heads * 2 * q.shape[2] * BLOCK))
    if scoring.batch_invariant:
        size = max_tiles = 1
    tiles = _tiles(starts, lengths, size, key_values.page_size, scoring)
    for batch in _batches(tiles, size, max_tiles):
        rows = [t.row + n for t in batch for n in range(t.rows)]
        values, sums = _attend_tiles(q[rows], key_values, batch, sinks, scoring)
        if v_scale is not None:
            values *= v_scale
        out[rows], lse[rows] = values.to(q.dtype), sums
    return out, lse


def _tiles(
    starts: Sequence[int], lengths: Sequence[int], size: int, page_size: int, scoring: Scoring
) -> Iterator[Tile]:
    """Tiles of up to ``size`` queries that together cover all queries."""
    for sequence, keys in enumerate(lengths):
        start, end = starts[sequence], starts[sequence + 1]
        for row in range(start, end, size):
            rows = min(size, end - row)
            position = keys - (end - row)
            last = min(keys, max(0, position + rows)) if scoring.causal else keys
            first = 0
            if scoring.window is not None:
                first = max(0, position - scoring.window + 1) // page_size * page_size
            yield Tile(sequence, row, rows, position, min(first, last), last)


def _batches(tiles: Iterator[Tile], rows: int, max_tiles: int) -> Iterator[list[Tile]]:
    """Batches of tiles with equally many queries: up to ``rows`` queries and ``max_tiles`` tiles.

    Tiles of a batch are sorted by number of keys, descending: once a tile has no further block of
    keys, no later tile of the batch has a further block.
    """
    batch: list[Tile] = []
    for tile in sorted(tiles, key=lambda t: (t.rows, t.keys), reverse=True):
        full = len(batch) == min(max_tiles, max(1, rows // tile.rows))
        if batch and (full or batch[0].rows != tile.rows):
            yield batch
            batch = []
        batch.append(tile)
    if batch:
        yield batch


def _attend_tiles(
    q: Tensor,
    key_values: KeyValues,
    tiles: Sequence[Tile],
    sinks: Tensor | None,
    scoring: Scoring,
) -> tuple[Tensor, Tensor]:
    """Attend queries ``(tiles · rows, Hq, D)`` of ``tiles``; return out and LSE in float32.

    Logits are base-2 here: an ``exp`` that underflows takes torch a hundred times longer, an
    ``exp2`` does not.
    """
    heads, rows, head_dim = key_values.heads, tiles[0].rows, q.shape[-1]
    group, shape = q.shape[1] // heads, q.shape[:2]
    factor = scoring.scale * (LOG2_E if scoring.soft_cap is None else 1 / scoring.soft_cap)
    q = q.reshape(-1, rows, heads, group, head_dim).transpose(1, 2).float() * factor
    q = q.reshape(-1, heads, rows * group, head_dim)
    row_max, row_sum = _initial_state(q, sinks, rows)
    values = torch.zeros_like(q)
    size = key_values.page_size
    block = max(BLOCK // size, 1) * size
    for start in range(0, tiles[0].keys, block):
        n = sum(t.keys > start for t in tiles)
        keys = min(block, tiles[0].keys - start)
        k, v = key_values.block(tiles[:n], start, keys)
        _clear(k, v, [_seen(t, scoring, start) for t in tiles[:n]])
        logits = q[:n] @ k.mT
        if scoring.soft_cap is not None:
            logits.tanh_().mul_(scoring.soft_cap * LOG2_E)
        bias = _bias(tiles[:n], start, keys, scoring)
        if bias is not None:
            logits.view(n, heads, rows, group, keys).add_(bias)
        before = row_max[:n].clone()
        row_max[:n] = before.maximum(logits.amax(-1, keepdim=True))
        p = logits.sub_(row_max[:n]).exp2_()
        rescale = before.sub_(row_max[:n]).exp2_()
        row_sum[:n].mul_(rescale).add_(p.sum(-1, keepdim=True))
        values[:n].mul_(rescale).add_(p @ v)
    # A row without keys has o = 0; its sum is the sink's, or 0.
    values /= row_sum.where(row_sum > 0, 1)
    lse = (row_max + row_sum.log2()) / LOG2_E
    out, lse = (
        x.view(len(tiles), heads, rows, group, -1).transpose(1, 2).reshape(*shape, -1)
        for x in (values, lse)
    )
    return out, lse.squeeze(-1)


def _seen(tile: Tile, scoring: Scoring, start: int) -> tuple[int, int]:
    """Begin and end of the keys that a tile's rows may see, relative to ``tile.first + start``."""
    window = math.inf if scoring.window is None else scoring.window
    return int(max(0, tile.position - window + 1 - tile.first - start)), tile.keys - start


def _clear(k: Tensor, v: Tensor, seen: Sequence[tuple[int, int]]) -> None:
    """Zero keys and values outside ``seen``, which no row sees: P = 0 times NaN is NaN."""
    for tile, (first, last) in enumerate(seen):
        for x in (k, v):
            if first > 0:
                x[tile, :, :first] = 0
            if last < x.shape[2]:
                x[tile, :, last:] = 0


def _initial_state(q: Tensor, sinks: Tensor | None, rows: int) -> tuple[Tensor, Tensor]:
    """Initial row_max and row_sum of each row of ``q``, from the sinks alone."""
    row_max = q.new_full((*q.shape[:-1], 1), LOWEST)
    if sinks is None:
        return row_max, torch.zeros_like(row_max)
    by_head = (sinks * LOG2_E).view(q.shape[1], 1, -1).expand(-1, rows, -1)
    sink = by_head.reshape(q.shape[1], -1, 1)
    row_max = row_max.maximum(sink)
    return row_max, (sink - row_max).exp2_()


def _bias(tiles: Sequence[Tile], start: int, keys: int, scoring: Scoring) -> Tensor | None:
    """Mask ``(tiles, 1, rows, 1, keys)``: −inf for keys that a row does not see; None: all 0."""
    firsts = [t.first + start for t in tiles]
    starts = list(zip(firsts, tiles, strict=True))
    ragged = any(first + keys > t.last for first, t in starts)
    after = scoring.causal and any(first + keys - 1 > t.position for first, t in starts)
    lost = math.inf if scoring.window is None else scoring.window
    before = any(first <= t.position + t.rows - 1 - lost for first, t in starts)
    if not (ragged or after or before):
        return None
    numbers = torch.tensor([[first, t.position, t.last] for first, t in starts])
    first, position, last = numbers.view(-1, 3, 1, 1, 1, 1).unbind(1)
    key = first + torch.arange(keys)
    position = position + torch.arange(tiles[0].rows).view(-1, 1, 1)
    hidden = key >= last
    if after:
        hidden = hidden | (key > position)
    if before:
        hidden = hidden | (key <= position - lost)
    return torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)


def to_float32(x: Tensor) -> Tensor:
    """Convert ``x`` to contiguous float32."""
    if x.dtype == torch.float8_e4m3fn:
        # torch converts float8 element by element, which takes five times longer.
        codes = x.view(torch.uint8).to(torch.int32, memory_format=torch.contiguous_format)
        return _E4M3.index_select(0, codes.flatten()).view(x.shape)
    return x.to(torch.float32, memory_format=torch.contiguous_format)


_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
