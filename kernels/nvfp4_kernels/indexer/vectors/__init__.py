"""Kernels that quantise vectors, store vectors in a paged cache, and gather stored vectors.

``layout`` assigns threads to vectors, and ``encode`` quantises 16 elements. One source serves sm_90
and sm_100.
"""
