"""Indexer of sparse attention: quantised queries and keys, their logits, and top-k."""

from nvfp4_kernels.indexer.cache_op import indexer_gather_k, indexer_quantize_q, indexer_store_k
from nvfp4_kernels.indexer.call import IndexerKeys, IndexerPagedKeys
from nvfp4_kernels.indexer.score_op import indexer_logits
from nvfp4_kernels.indexer.topk_op import indexer_score_topk, indexer_topk

__all__ = [
    "IndexerKeys",
    "IndexerPagedKeys",
    "indexer_gather_k",
    "indexer_logits",
    "indexer_quantize_q",
    "indexer_score_topk",
    "indexer_store_k",
    "indexer_topk",
]
