"""Semantics of the lane-wise PTX instructions, independent of warps, memory and time."""
