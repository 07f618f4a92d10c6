"""Kernels that read rows of activations once and write them as NVFP4: what such ops share.

``tile`` says how threads are laid over rows, ``operands`` what the host hands over; the rest are
device parts and need CuTe DSL.
"""
