"""Shared parts of row-wise kernels whose CTA has one row, or a part of one, in vectors of 8.

``tile`` is the layout of threads; the other modules are device code and need CuTe DSL. ``fp8`` and
``kernel`` write rows as E4M3, in the order of ``formats.fp8_rows``.
"""
