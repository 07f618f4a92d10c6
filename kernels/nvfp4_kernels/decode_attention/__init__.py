"""Attention of one token of each sequence, which its cache gets on the way."""

from nvfp4_kernels.decode_attention.op import decode_attention

__all__ = ["decode_attention"]
