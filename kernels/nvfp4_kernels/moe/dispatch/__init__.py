"""Permutation of tokens, quantised or copied, into token tiles, by a routing, ids or logits."""
