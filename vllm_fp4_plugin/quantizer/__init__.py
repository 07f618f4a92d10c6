"""Quantise a 16-bit or 32-bit checkpoint to NVFP4, without vLLM.

``checkpoint.quantize_checkpoint`` is the Python function, ``command.quantize`` the command.
"""
