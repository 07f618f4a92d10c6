"""Rotation of queries and keys, and the store of keys and values into the paged cache."""

from nvfp4_kernels.rotary_store.op import rotary_store

__all__ = ["rotary_store"]
