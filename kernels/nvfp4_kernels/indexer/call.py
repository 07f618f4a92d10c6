"""Contiguous and paged keys, and the arguments of an indexer op as one value."""

from typing import NamedTuple

from torch import Tensor

from nvfp4_kernels.indexer.formats import Format


class IndexerKeys(NamedTuple):
    """Contiguous keys, and the keys that each of T queries sees.

    Attributes:
        k: ``(Tk, D)`` in the queries' format, as ``indexer_gather_k`` returns it.
        k_scales: scales of ``k``; None for bf16.
        ks: int32 ``(T,)``, the first key that a query sees, from 0 to Tk.
        ke: int32 ``(T,)``, the key after the last that a query sees, from ``ks`` to Tk.
    """

    k: Tensor
    k_scales: Tensor | None
    ks: Tensor
    ke: Tensor


class IndexerPagedKeys(NamedTuple):
    """Keys of B sequences in a paged cache, and the keys that each query sees.

    Attributes:
        cache: uint8 ``(pages, page_bytes)`` as ``indexer_store_k`` writes it; slots beyond a
            context may hold anything.
        context_lens: int32 ``(B, next_n)``: query i of sequence b sees the sequence's first
            ``context_lens[b, i]`` keys.
        block_table: int32 ``(B, P)``: page ``block_table[b, i]`` holds the keys of sequence b from
            key ``i · block_size`` on. Entries after a sequence's last page may hold anything.
        max_context_len: upper bound on ``context_lens``.
        block_size: number of keys per page; on sm_100 a power of two of at least 16, and pages are
            16-byte aligned.
    """

    cache: Tensor
    context_lens: Tensor
    block_table: Tensor
    max_context_len: int
    block_size: int


class ScoreCall(NamedTuple):
    """Arguments of ``indexer_logits``, and of ``indexer_score_topk`` if ``top_k`` is not 0."""

    q: Tensor
    q_scales: Tensor | None
    keys: IndexerKeys | IndexerPagedKeys
    weights: Tensor
    fmt: Format
    top_k: int = 0

    @property
    def min_keys(self) -> int:
        """Fewest visible keys for which a query is scored."""
        return self.top_k + 1


class GatherCall(NamedTuple):
    """Arguments of ``indexer_gather_k``."""

    cache: Tensor
    block_table: Tensor
    key_start: Tensor
    total_keys: int
    head_dim: int
    fmt: Format
    block_size: int
