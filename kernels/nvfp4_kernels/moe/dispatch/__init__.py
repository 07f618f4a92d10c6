"""Permutation of tokens into token tiles, by a routing, ids or logits; in NVFP4 or as is."""
