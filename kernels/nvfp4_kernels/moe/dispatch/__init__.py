"""Permutation of tokens into token tiles, by a routing, ids or logits; to NVFP4 or unchanged."""
