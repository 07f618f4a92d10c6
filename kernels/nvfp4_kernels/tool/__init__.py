"""``python -m nvfp4_kernels``: build kernels ahead of time, report on kernels, check on a GPU."""
