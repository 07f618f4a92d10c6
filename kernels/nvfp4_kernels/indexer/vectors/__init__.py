"""Kernels for single vectors: they are quantised, stored in a paged cache, and read from it.

``layout`` says how threads are laid over vectors, ``encode`` what becomes of 16 elements; Hopper
and Blackwell run the same kernels.
"""
