"""Storage, scoring and top-k of one layer's keys, driven by vLLM's metadata.

A step's tokens are ordered: decodes first, then prefills.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nvfp4_kernels.indexer import (
    IndexerKeys,
    IndexerPagedKeys,
    indexer_gather_k,
    indexer_quantize_q,
    indexer_score_topk,
    indexer_store_k,
)
from nvfp4_kernels.indexer.formats import Format
from vllm_fp4_plugin.indexer.cache import pages
from vllm_fp4_plugin.indexer.choice import OPTION, UnsupportedIndexer


@dataclass(frozen=True, eq=False)
class Queries:
    """A step's queries in the format of the keys.

    Attributes:
        data: ``(T, H, D)``, or ``(T, H, D/2)`` in a 4-bit format.
        scales: scales of the data; None if the format has none, or the weights include the scales.
        weights: float32 ``(T, H)``.
    """

    data: Tensor
    scales: Tensor | None
    weights: Tensor

    def rows(self, rows: slice) -> "Queries":
        """Queries of the tokens in ``rows``."""
        scales = None if self.scales is None else self.scales[rows]
        return Queries(self.data[rows], scales, self.weights[rows])


@dataclass(frozen=True, eq=False)
class KeySelector:
    """Storage and top-k selection of a layer's keys, with the settings common to all steps.

    Attributes:
        fmt: format of queries and keys.
        head_dim: D.
        top_k: number of keys to select.
        max_context_len: largest number of keys of a sequence.
        max_gathered_keys: largest number of keys that one chunk of prefills gathers.
        global_scale: float32 ``()`` for nvfp4, else None.
    """

    fmt: Format
    head_dim: int
    top_k: int
    max_context_len: int
    max_gathered_keys: int
    global_scale: Tensor | None

    def check_queries(self, q: Tensor, scales: Tensor | None) -> None:
        """Check that the queries of the model's layer are bfloat16 or in the keys' format.

        Raises:
            UnsupportedIndexer: the queries are quantised in another format.
        """
        if q.dtype == torch.bfloat16:
            return
        came = "fp8" if scales is None else "mxfp4"
        if came != self.fmt.name:
            raise UnsupportedIndexer(
                f"{OPTION}: is {self.fmt.name!r}, but the model's layer quantises its queries to "
                f"{came}, and quantising them again would lose more than either; choose {came!r}"
            )

    def reserve(self, device: torch.device) -> None:
        """Allocate and free the memory of gathered keys, so that vLLM's profile run counts it."""
        count = self.max_gathered_keys * self.fmt.page_bytes(self.head_dim, 1)
        torch.empty(count, dtype=torch.uint8, device=device)

    def store(self, k: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """Store keys in the cache.

        Args:
            k: bfloat16 ``(≥ T, D)``; rows after the last slot are padding.
            kv_cache: uint8 ``(pages, block_size, bytes of a key)``.
            slot_mapping: int64 ``(T,)``, ``page · block_size + offset``; −1: not stored.
        """
        indexer_store_k(
            k[: len(slot_mapping)], pages(kv_cache), slot_mapping, self.fmt.name,
            kv_cache.shape[1], self.global_scale,
        )  # fmt: skip

    def select(
        self,
        q: Tensor,
        scales: Tensor | None,
        weights: Tensor,
        kv_cache: Tensor,
        metadata: Any,
        out: Tensor,
    ) -> None:
        """Select keys for every token of a step.

        Args:
            q: ``(T, H, D)``: bfloat16, or e4m3 with its scales included in the weights; or uint8
                ``(T, H, D/2)`` of mxfp4.
            scales: int32 ``(T, H)`` with mxfp4, four E8M0 bytes each; otherwise None.
            weights: float32 ``(T, H)``.
            kv_cache: as for ``store``, with this step's keys in it.
            metadata: vLLM's ``DeepseekV32IndexerMetadata``.
            out: int32 ``(≥ T, ≥ top_k)``; the first T rows are overwritten, each with the positions
                of the selected keys in the token's sequence, ascending, then −1.
        """
        self.check_queries(q, scales)
        out[: len(q)] = -1
        count = metadata.num_decode_tokens + metadata.num_prefill_tokens
        if not count:
            return
        queries = self._queries(q[:count], scales, weights[:count])
        if metadata.prefill is not None:
            self._prefill(queries, kv_cache, metadata.prefill.chunks, out)
        if metadata.num_decode_tokens:
            decodes = queries.rows(slice(0, metadata.num_decode_tokens))
            self._decode(decodes, kv_cache, metadata.decode, out)

    def _queries(self, q: Tensor, scales: Tensor | None, weights: Tensor) -> Queries:
        weights = weights.float().contiguous()
        if q.dtype == torch.bfloat16:
            data, block_scales = indexer_quantize_q(q, self.fmt.name, self.global_scale)
            return Queries(data, block_scales, weights)
        if scales is not None:
            scales = scales[: len(q)].unsqueeze(-1).view(torch.float8_e8m0fnu)
        return Queries(q, scales, weights)

    def _prefill(self, queries: Queries, kv_cache: Tensor, chunks: Any, out: Tensor) -> None:
        """Select keys chunk by chunk, after gathering the keys of the chunk's sequences."""
        for chunk in chunks:
            # vLLM splits the queries of a long sequence: later chunks see the same keys.
            if not chunk.skip_kv_gather:
                k, k_scales = indexer_gather_k(
                    pages(kv_cache), chunk.block_table, chunk.cu_seq_lens, chunk.total_seq_lens,
                    self.head_dim, self.fmt.name, kv_cache.shape[1],
                )  # fmt: skip
            rows = slice(chunk.token_start, chunk.token_end)
            some = queries.rows(rows)
            keys = IndexerKeys(k, k_scales, chunk.cu_seqlen_ks, chunk.cu_seqlen_ke)
            indices, _ = indexer_score_topk(
                some.data, some.scales, keys, some.weights, self.top_k, self.fmt.name
            )
            out[rows, : self.top_k] = indices

    def _decode(self, queries: Queries, kv_cache: Tensor, decode: Any, out: Tensor) -> None:
        """Select keys for all decodes in one call; a sequence's queries are consecutive tokens."""
        tokens = len(queries.data)
        context_lens, block_table = _decode_contexts(decode, tokens)
        scales = queries.scales
        keys = IndexerPagedKeys(
            pages(kv_cache),
            context_lens,
            block_table,
            # Not the maximum of this step: a CUDA graph, and later steps of a draft model, reuse
            # metadata of shorter contexts.
            self.max_context_len,
            kv_cache.shape[1],
        )
        indices, _ = indexer_score_topk(
            queries.data.unflatten(0, context_lens.shape),
            None if scales is None else scales.unflatten(0, context_lens.shape),
            keys,
            queries.weights,
            self.top_k,
            self.fmt.name,
        )
        out[:tokens, : self.top_k] = indices


def _decode_contexts(decode: Any, tokens: int) -> tuple[Tensor, Tensor]:
    """Number of visible keys of each query, and pages of each sequence, for all decodes.

    The shapes are ``(B, next_n)`` and ``(B, P)`` for B sequences of at most P pages if each has
    next_n queries. Otherwise, for instance if a CUDA graph is padded with sequences without
    queries, each query counts as a sequence of its own: ``(tokens, 1)`` and ``(tokens, P)``. No
    host sync is needed.
    """
    sequences, next_n = len(decode.decode_lens), decode.seq_lens.shape[1]
    seq_lens, block_table = decode.seq_lens[:sequences], decode.block_table[:sequences]
    if not decode.requires_padding and sequences * next_n == tokens:
        return seq_lens.contiguous(), block_table
    ends = decode.decode_lens.cumsum(0)
    token = torch.arange(tokens, device=ends.device)
    sequence = torch.searchsorted(ends, token, right=True).clamp_(max=sequences - 1)
    # The last column belongs to a sequence's last query.
    column = next_n - (ends[sequence] - token)
    context_lens = seq_lens[sequence, column.clamp(0, next_n - 1)]
    context_lens = context_lens.where(column < next_n, 0)  # padding tokens
    return context_lens.unsqueeze(1), block_table[sequence]
