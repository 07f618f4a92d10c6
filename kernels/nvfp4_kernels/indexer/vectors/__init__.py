"""Kernels that quantise vectors, store vectors in a paged cache, and gather stored vectors.

``layout`` assigns threads to vectors, ``encode`` quantises 16 elements; one source for sm_90 and
sm_100.
"""
