"""Kernels that a model needs: every one that any batch is given, and no others. No CuTe in here.

For whoever compiles them before they are launched.
"""
