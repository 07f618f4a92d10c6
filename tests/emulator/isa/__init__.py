"""Semantics of each lane-wise PTX instruction, and nothing about warps, memory or time."""
