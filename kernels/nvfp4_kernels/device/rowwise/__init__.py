"""Shared parts of row-wise kernels, which read rows of activations once and write NVFP4.

``tile`` is the thread layout over rows, and ``operands`` the host side; the other modules are
device code and need CuTe DSL.
"""
