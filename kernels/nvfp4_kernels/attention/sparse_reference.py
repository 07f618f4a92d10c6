"""``sparse_attention`` in torch: every token is a sequence, whose keys are the listed keys."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nvfp4_kernels.attention.call import SparseCall
from nvfp4_kernels.attention.reference import Tile, attend, to_float32


@dataclass(frozen=True)
class IndexedKeyValues:
    """Keys and values at each token's top-k indices.

    Attributes:
        cache: ``(pages, heads, page_size, 2·D)``.
        table: pages of each sequence.
        indices: ``(T, k)``, positions of keys in the token's sequence.
        sequences: ``(T,)``, index of each token's sequence.
    """

    cache: Tensor
    table: Tensor
    indices: Tensor
    sequences: Tensor

    @property
    def heads(self) -> int:
        return self.cache.shape[1]

    @property
    def page_size(self) -> int:
        return 1  # a list may begin anywhere

    def block(self, tiles: Sequence[Tile], start: int, count: int) -> tuple[Tensor, Tensor]:
        """See ``KeyValues.block``; past a list's end, the last listed key is repeated."""
        bounds = torch.tensor([(t.row, t.last - 1) for t in tiles])
        row, last = bounds.view(-1, 2, 1).unbind(1)
        positions = self.indices[row, (start + torch.arange(count)).minimum(last)]
        size = self.cache.shape[2]
        pages = self.table[self.sequences[row], positions // size]
        cache = self.cache
        if cache.dtype == torch.float8_e4m3fn:
            cache = cache.view(torch.uint8)  # float8 has no indexing
        found = cache.transpose(1, 2)[pages, positions % size].view(self.cache.dtype)
        k, v = (to_float32(half) for half in found.transpose(1, 2).chunk(2, -1))
        return k, v


def sparse_attention(call: SparseCall) -> tuple[Tensor, Tensor]:
    """See ``nvfp4_kernels.attention.sparse_op.sparse_attention``."""
    scoring, table = call.scoring, call.block_table
    if call.k_scale is not None:
        scoring = replace(scoring, scale=scoring.scale * call.k_scale.item())
    sequences = torch.arange(len(table)).repeat_interleave(call.query_start.diff().long())
    key_values = IndexedKeyValues(call.kv_cache, table, call.indices, sequences)
    starts, lengths = range(len(sequences) + 1), call.lens[: len(sequences)].tolist()
    return attend(
        call.q, key_values, starts, lengths, call.sinks, scoring,
        v_scale=call.v_scale, out=call.out,
    )  # fmt: skip
