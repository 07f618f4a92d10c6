"""Permutation of tokens into padded token tiles, with or without quantisation to NVFP4."""
