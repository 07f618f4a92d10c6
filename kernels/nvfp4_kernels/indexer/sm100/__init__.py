"""Scoring by the sparse-attention indexer on sm_100: a matrix product, then a sum over heads."""
