"""Checks of compiled kernels' machine code, as printed by CUDA's ``nvdisasm``."""
