"""Lists of exactly the kernels that a model needs, over all batches, for ahead-of-time compilation.

Imports no CuTe.
"""
