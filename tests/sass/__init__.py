"""Checks of the machine code of compiled kernels, as CUDA's ``nvdisasm`` prints it."""
