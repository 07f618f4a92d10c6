"""Softmax attention to dense, ragged, paged or listed keys; fused decodes; merge of segments."""

from nvfp4_kernels.attention.decode.op import decode_attention
from nvfp4_kernels.attention.merge.op import merge_segments
from nvfp4_kernels.attention.op import attention
from nvfp4_kernels.attention.paged_op import paged_attention
from nvfp4_kernels.attention.rotary_op import HeadRotation, rotary_attention
from nvfp4_kernels.attention.sparse_op import sparse_attention

__all__ = [
    "HeadRotation",
    "attention",
    "decode_attention",
    "merge_segments",
    "paged_attention",
    "rotary_attention",
    "sparse_attention",
]
