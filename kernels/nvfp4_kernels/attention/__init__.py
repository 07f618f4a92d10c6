"""Softmax attention: dense or ragged tensors, vLLM's paged KV cache, and chosen keys of that."""

from nvfp4_kernels.attention.op import attention, paged_attention
from nvfp4_kernels.attention.sparse_op import sparse_attention

__all__ = ["attention", "paged_attention", "sparse_attention"]
