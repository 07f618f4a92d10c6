"""Rotary position embedding of queries and keys."""

from nvfp4_kernels.rotary_embedding.op import rotary_embedding

__all__ = ["rotary_embedding"]
