"""Rotary embedding of queries and keys, with the store of keys and values to the paged cache."""
