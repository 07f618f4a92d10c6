"""Softmax attention: dense, ragged, over a paged KV cache or listed keys; decode, merge."""

from nvfp4_kernels.attention.decode.op import decode_attention
from nvfp4_kernels.attention.merge.op import merge_segments
from nvfp4_kernels.attention.op import attention, paged_attention
from nvfp4_kernels.attention.quantized_op import paged_attention_quantized
from nvfp4_kernels.attention.rotary_op import HeadRotation, rotary_attention
from nvfp4_kernels.attention.sparse_op import sparse_attention

__all__ = [
    "HeadRotation",
    "attention",
    "decode_attention",
    "merge_segments",
    "paged_attention",
    "paged_attention_quantized",
    "rotary_attention",
    "sparse_attention",
]
