"""Lists of exactly the kernels that a model needs, for any batch, to compile ahead of time.

Imports no CuTe.
"""
