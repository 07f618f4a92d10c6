"""Decode attention on sm_90: one token per sequence."""
