"""Softmax attention: dense or ragged tensors, and vLLM's paged KV cache."""

from nvfp4_kernels.attention.op import attention, paged_attention

__all__ = ["attention", "paged_attention"]
