"""Kernels that a model needs for all batches, and no others. No CuTe in here.

For ahead-of-time compilation.
"""
