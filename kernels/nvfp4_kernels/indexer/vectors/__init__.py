"""Kernels that quantise vectors, store them in a paged cache, and gather them from it.

``layout`` assigns threads to vectors, ``encode`` quantises 16 elements; one source for sm_90 and
sm_100.
"""
