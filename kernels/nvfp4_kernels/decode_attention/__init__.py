"""Attention of one new token per sequence, whose key and value are stored in the KV cache."""

from nvfp4_kernels.decode_attention.op import decode_attention

__all__ = ["decode_attention"]
