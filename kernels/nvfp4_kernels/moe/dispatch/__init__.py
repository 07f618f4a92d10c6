"""Tokens in token tiles: from tiles, ids or logits, to NVFP4 or as they are."""
