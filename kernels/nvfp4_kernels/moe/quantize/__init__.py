"""Tokens of a mixture of experts brought into token tiles, as NVFP4 or as they are."""
