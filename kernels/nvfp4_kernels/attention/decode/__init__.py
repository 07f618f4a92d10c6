"""Attention of one new token per sequence, whose key and value are stored in the KV cache."""
