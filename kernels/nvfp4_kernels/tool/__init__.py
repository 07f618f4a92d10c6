"""``python -m nvfp4_kernels``: build kernels ahead of time, report on them, check them on a GPU."""
