"""Rotary position embedding of queries and keys, alone or with the store into the KV cache."""

from nvfp4_kernels.rotary.op import rotary_embedding
from nvfp4_kernels.rotary.store.op import rotary_store

__all__ = [
    "rotary_embedding",
    "rotary_store",
]
