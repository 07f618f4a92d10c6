"""Attention on sm_90: one token per sequence."""
