"""Softmax attention over dense or ragged tensors, a paged KV cache, and listed keys of one."""

from nvfp4_kernels.attention.op import attention, paged_attention
from nvfp4_kernels.attention.quantized_op import paged_attention_quantized
from nvfp4_kernels.attention.rotary_op import HeadRotation, rotary_attention
from nvfp4_kernels.attention.sparse_op import sparse_attention

__all__ = [
    "HeadRotation",
    "attention",
    "paged_attention",
    "paged_attention_quantized",
    "rotary_attention",
    "sparse_attention",
]
