"""Indexer of sparse attention: quantised queries and keys, their logits, and top-k."""

from nvfp4_kernels.indexer.cache_op import indexer_gather_k, indexer_quantize_q, indexer_store_k
from nvfp4_kernels.indexer.score_op import indexer_logits, indexer_logits_paged
from nvfp4_kernels.indexer.topk_op import (
    indexer_score_topk,
    indexer_score_topk_paged,
    indexer_topk,
)

__all__ = [
    "indexer_gather_k",
    "indexer_logits",
    "indexer_logits_paged",
    "indexer_quantize_q",
    "indexer_score_topk",
    "indexer_score_topk_paged",
    "indexer_store_k",
    "indexer_topk",
]
