"""Rotation of queries and keys, and the store of keys and values into the paged cache."""
